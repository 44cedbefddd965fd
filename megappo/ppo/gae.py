"""Generalised advantage estimation over ragged responses, without a loop over tokens."""

from collections.abc import Iterator

import torch

from megappo.ppo.ragged import Packing, add_to_last_token, are_prefixes
from megappo.ppo.scan import DiscountedSums, full_precision

CHUNK_TOKENS = 2**20
"""Tokens taken together, so that what is computed on the way stays in a CPU's cache."""


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
        FloatingPointError: a reward or value on a token with mask 1, or a value to bootstrap from, is not finite.
    Source: Schulman et al. 2016, eq. 16; masked tokens as in verl's compute_gae_advantage_return.
    """
    lam = torch.as_tensor(lam, dtype=torch.float64, device=values.device)
    shared = None if lam.dim() else _LambdaReturns(gamma, lam, values)
    advantages, returns = (torch.empty_like(values, dtype=torch.float32) for _ in range(2))
    with full_precision():
        for rows in _chunks(values):
            mask = response_mask[rows].float()
            bootstraps = None if bootstrap_values is None else gamma * bootstrap_values[rows]
            lambda_returns = shared or _LambdaReturns(gamma, lam[rows], values)
            for mask_into in (_multiply, _select):
                # In place: a third of the time goes into touching the new memory, whatever is written there.
                mask_into(returns[rows], token_level_rewards[rows], mask)
                mask_into(advantages[rows], values[rows], mask)
                returns[rows] = lambda_returns(returns[rows], advantages[rows], mask, bootstraps)
                torch.sub(returns[rows], advantages[rows], out=advantages[rows])
                if advantages[rows].sum().isfinite():
                    break
            else:
                _check_finite(advantages[rows], rows.start)
    return advantages, returns


def _chunks(x: torch.Tensor) -> Iterator[slice]:
    """Slices of rows."""
    size = max(1, CHUNK_TOKENS // max(1, x.shape[1]))
    return (slice(start, start + size) for start in range(0, len(x), size))


def _multiply(out: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> None:
    """x where the mask is 1; elsewhere 0 where x is finite. On a CPU several times as fast as _select."""
    torch.mul(x, mask, out=out)


def _select(out: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> None:
    """x where the mask is 1; elsewhere 0."""
    out.copy_(torch.where(mask.bool(), x, 0.0))


class _LambdaReturns:
    """returns[t] = rewards[t] + gamma * (1 - lam) * values[t + 1] + gamma * lam * returns[t + 1]: advantages + values.

    Args:
        lam: float64, 0-dim or [rows].
        values: [B, R], any of the device and width of what is to come.
    """

    def __init__(self, gamma: float, lam: torch.Tensor, values: torch.Tensor):
        # float32 for speed on a CPU; elsewhere float64, which TF32 and autocast leave alone.
        dtype = torch.float32 if values.device.type == "cpu" else torch.float64
        self.scan = DiscountedSums(gamma * lam, values.shape[1], dtype)
        self.weight = (gamma * (1 - lam)).float()[..., None]

    def __call__(
        self, rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, bootstraps: torch.Tensor | None
    ) -> torch.Tensor:
        """[rows, R], from rewards and values that are 0 where the mask is, which is float32. Overwrites rewards."""
        if bootstraps is not None:
            rewards = add_to_last_token(rewards, mask.bool(), bootstraps)
        if are_prefixes(mask):
            rewards[:, :-1].addcmul_(values[:, 1:], self.weight)
            return self.scan(rewards)
        packing = Packing(mask.bool())
        rewards, values = packing.pack(rewards), packing.pack(values)
        rewards[:, :-1].addcmul_(values[:, 1:], self.weight)
        return packing.unpack(self.scan(rewards))


def _check_finite(advantages: torch.Tensor, first_row: int) -> None:
    """A NaN or infinity among a row's inputs reaches its advantages, and their sum."""
    broken = (~advantages.isfinite()).any(dim=1).nonzero().flatten() + first_row
    if len(broken):
        raise FloatingPointError(
            f"rewards, values or bootstrap_values of responses {broken[:10].tolist()} are not finite on tokens with "
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
