"""Generalised advantage estimation over ragged responses, without a loop over tokens."""

from collections.abc import Iterator

import torch

from megappo.ppo.ragged import Packing, add_to_last_token, has_holes, keep
from megappo.ppo.scan import DiscountedSums

CACHED_TOKENS = 2**17
"""Tokens taken together on a CPU: what is computed between inputs and outputs stays in a core's cache."""


@torch.no_grad()
def gae(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float | torch.Tensor,
    *,
    bootstrap_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates and returns (advantages + values), neither whitened.

    Args:
        token_level_rewards, values: [B, R] float32.
        response_mask: [B, R], 1 on tokens the policy wrote. A token with mask 0 contributes nothing, whatever stands
            there: the next value and the running sum are carried through it, without discount.
        gamma: discount per token.
        lam: lambda per token; [B] for one of each response's own.
        bootstrap_values: [B], the value after each response's last token with mask 1. None = 0.

    Returns:
        (advantages, returns), each [B, R] float32, 0 where the mask is 0: in the whole of a row without any token.

    Raises:
        ValueError: a reward or value on a token with mask 1, or a value to bootstrap from, is not finite.
    Source: Schulman et al. 2016, eq. 16; masked tokens as in verl's compute_gae_advantage_return.
    """
    lam = torch.as_tensor(lam, dtype=torch.float64, device=values.device)
    shared = DiscountedSums(gamma * lam, values.shape[1]) if lam.dim() == 0 else None
    advantages, returns = (torch.empty_like(values, dtype=torch.float32) for _ in range(2))
    for rows in _chunks(values):
        valid = response_mask[rows].bool()
        rewards, kept_values = keep(valid, token_level_rewards[rows], values[rows])
        if bootstrap_values is not None:
            rewards = add_to_last_token(rewards, valid, gamma * bootstrap_values[rows])
        row_lam = lam if shared else lam[rows]
        scan = shared or DiscountedSums(gamma * row_lam, values.shape[1])
        returns[rows] = _lambda_returns(rewards, kept_values, valid, gamma * (1 - row_lam), scan)
        torch.sub(returns[rows], kept_values, out=advantages[rows])
    _check_finite(advantages)
    return advantages, returns


def _chunks(x: torch.Tensor) -> Iterator[slice]:
    """Slices of rows, on a GPU all of them in one."""
    size = max(1, CACHED_TOKENS // max(1, x.shape[1])) if x.device.type == "cpu" else max(1, len(x))
    return (slice(start, start + size) for start in range(0, len(x), size))


def _lambda_returns(
    rewards: torch.Tensor, values: torch.Tensor, valid: torch.Tensor, weight: torch.Tensor, scan: DiscountedSums
) -> torch.Tensor:
    """returns[t] = rewards[t] + weight * values[t + 1] + decay * returns[t + 1], [rows, R] float64.

    With weight = gamma * (1 - lam) and decay = gamma * lam these are advantages + values. Overwrites rewards.
    """
    packing = Packing(valid) if has_holes(valid) else None
    if packing is not None:
        rewards, values = packing.pack(rewards), packing.pack(values)
    rewards[:, :-1].addcmul_(values[:, 1:], weight[..., None].float())
    returns = scan(rewards)
    return returns if packing is None else packing.unpack(returns)


def _check_finite(advantages: torch.Tensor) -> None:
    """A NaN or infinity among a row's inputs reaches its advantages, and their sum."""
    broken = (~advantages.sum(dim=1).isfinite()).nonzero().flatten().tolist()
    if broken:
        raise ValueError(
            f"rewards, values or bootstrap_values of responses {broken[:10]} are not finite on tokens with "
            "response_mask 1"
        )


def length_adaptive_lam(response_mask: torch.Tensor, alpha: float) -> torch.Tensor:
    """A lambda for each response, the closer to 1 the longer it is: 1 - 1 / (alpha * length), within [0, 1].

    Args:
        response_mask: [B, R], 1 on tokens the policy wrote; length counts them.
        alpha: VAPO takes 0.05, so that a response of 20 tokens or fewer has lambda 0 and one of 2000 has 0.99.

    Returns:
        [B] float32, 0 for a response without any token.

    Raises:
        ValueError: alpha is not positive.
    Source: VAPO (Yue et al. 2025), Length-adaptive GAE: the sum of lambda's powers is proportional to the length.
    """
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    lengths = response_mask.bool().sum(dim=1).double()
    return (1 - 1 / (alpha * lengths)).clamp(0.0, 1.0).float()
