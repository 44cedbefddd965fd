"""Generalised advantage estimation over ragged responses, without a loop over tokens."""

from collections.abc import Iterator

import torch

from megappo.ppo.ragged import Packing, add_to_last_token, are_prefixes
from megappo.ppo.scan import (
    MASKED_BLOCK,
    MASKED_TOKENS,
    SMALLEST_MASKED_DECAY,
    DiscountedSums,
    full_precision,
    sums_behind,
)

CHUNK_TOKENS, PANEL_TOKENS = 2**20, 2**19
"""Tokens of rows, and of columns, taken together, so that what is computed on the way stays in a CPU's cache."""
FEW_ROWS = 64
"""Below, starting the operations on columns takes longer than moving the rows' tokens together."""


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
    with full_precision():
        holes = any(not are_prefixes(response_mask[rows].float()) for rows in _chunks(values))
        # On a GPU, too, it is starting operations that takes long, not moving tokens.
        many = values.device.type == "cpu" and len(values) >= FEW_ROWS
        if holes and many and bool((gamma * lam).min() >= SMALLEST_MASKED_DECAY):
            return _by_columns(token_level_rewards, values, response_mask, gamma, lam, bootstrap_values)
        return _by_rows(token_level_rewards, values, response_mask, gamma, lam, bootstrap_values, holes)


def _by_rows(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: torch.Tensor,
    bootstrap_values: torch.Tensor | None,
    holes: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gae`, a few rows at a time, of which the tokens with mask 1 are moved together first where there are holes."""
    shared = None if lam.dim() else _LambdaReturns(gamma, lam, values, holes)
    advantages, returns = (torch.empty_like(values, dtype=torch.float32) for _ in range(2))
    for rows in _chunks(values):
        mask = response_mask[rows].float()
        bootstraps = None if bootstrap_values is None else gamma * bootstrap_values[rows]
        lambda_returns = shared or _LambdaReturns(gamma, lam[rows], values, holes)
        for mask_into in (_multiply, _select):
            # In place: a third of the time goes into touching the new memory, whatever is written there.
            mask_into(returns[rows], token_level_rewards[rows], mask)
            mask_into(advantages[rows], values[rows], mask)
            returns[rows] = lambda_returns(returns[rows], advantages[rows], mask, bootstraps)
            torch.sub(returns[rows], advantages[rows], out=advantages[rows])
            if advantages[rows].sum().isfinite():
                break
        else:
            _check_finite(advantages[rows], torch.arange(rows.start, rows.stop))
    return advantages, returns


def _by_columns(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: torch.Tensor,
    bootstrap_values: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gae`, a few columns at a time from the last to the first, and of them only rows that have tokens with mask 1.

    With d = gamma * lam, advantages[t] + values[t] - rewards[t] is the sum over later tokens s with mask 1 of d to the
    power of how many these are from t on, times rewards[s] + (1 / lam - 1) * values[s].
    """
    advantages, returns = (torch.zeros_like(values, dtype=torch.float32) for _ in range(2))
    lam = lam.expand(len(values))
    behind = torch.zeros_like(lam) if bootstrap_values is None else bootstrap_values / lam
    for columns in _panels(values):
        rows = response_mask[:, columns].amax(dim=1).nonzero().flatten()
        if not len(rows):
            continue
        panel = (x[:, columns].index_select(0, rows).float() for x in (token_level_rewards, values, response_mask))
        rewards, old_values, mask = panel
        for _ in range(2):
            x = torch.addcmul(rewards, old_values, (1 / lam[rows] - 1).float()[:, None])
            sums, reached = sums_behind(x, mask, gamma * lam[rows], behind[rows])
            new_returns = sums.add_(rewards).mul_(mask)
            found = torch.addcmul(new_returns, old_values, mask, value=-1)
            if found.sum().isfinite():
                break
            rewards, old_values = (torch.where(mask.bool(), x, 0.0) for x in (rewards, old_values))
        else:
            _check_finite(found, rows)
        behind[rows] = reached
        advantages[:, columns].index_copy_(0, rows, found)
        returns[:, columns].index_copy_(0, rows, new_returns)
    return advantages, returns


def _chunks(x: torch.Tensor) -> Iterator[slice]:
    """Slices of rows."""
    size = max(1, CHUNK_TOKENS // max(1, x.shape[1]))
    return (slice(start, min(start + size, len(x))) for start in range(0, len(x), size))


def _panels(x: torch.Tensor) -> Iterator[slice]:
    """Slices of columns, the last first."""
    size = min(MASKED_TOKENS, max(1, PANEL_TOKENS // len(x) // MASKED_BLOCK) * MASKED_BLOCK)
    return (slice(start, start + size) for start in reversed(range(0, x.shape[1], size)))


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
        holes: whether there are tokens with mask 0 before some with mask 1.
    """

    def __init__(self, gamma: float, lam: torch.Tensor, values: torch.Tensor, holes: bool):
        self.holes = holes
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
        if not self.holes:
            rewards[:, :-1].addcmul_(values[:, 1:], self.weight)
            return self.scan(rewards)
        packing = Packing(mask.bool())
        rewards, values = packing.pack(rewards), packing.pack(values)
        rewards[:, :-1].addcmul_(values[:, 1:], self.weight)
        return packing.unpack(self.scan(rewards))


def _check_finite(advantages: torch.Tensor, rows: torch.Tensor) -> None:
    """A NaN or infinity among a row's inputs reaches its advantages, and their sum."""
    broken = rows[(~advantages.isfinite()).any(dim=1).cpu()]
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
