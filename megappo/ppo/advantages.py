"""Rewards per token, advantages, returns, whitening, explained variance. All [B, R] float32 over padded responses."""

from collections.abc import Callable

import torch
import torch.distributed as dist


def compute_token_level_rewards(
    scores: torch.Tensor, response_mask: torch.Tensor, kl: torch.Tensor | None = None, kl_coef: float = 0.0
) -> torch.Tensor:
    """Put each response's score on its last token with mask 1 and subtract the KL penalty from every token.

    Args:
        scores: [B] float32, one per response.
        response_mask: [B, R], 1 on tokens the policy wrote.
        kl: [B, R] KL estimate of each token; None = no penalty.
        kl_coef: weight of the penalty, in score per nat.

    Returns:
        token_level_rewards, [B, R] float32, 0 where the mask is 0.

    Raises:
        ValueError: a response has no token with mask 1, so its score would be lost; or a score is not finite.
    Source: Ouyang et al. 2022 (InstructGPT), eq. 2.
    """
    valid = response_mask.bool()
    empty = (~valid.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"responses {empty[:10]} have no token with response_mask 1, so their score has no place")
    broken = (~scores.isfinite()).nonzero().flatten().tolist()
    if broken:
        raise ValueError(f"scores of responses {broken[:10]} are not finite: {scores[broken[:10]].tolist()}")
    penalty = torch.zeros_like(response_mask, dtype=torch.float32) if kl is None else kl_coef * kl.float()
    rewards = torch.where(valid, -penalty, 0.0)
    position = torch.arange(valid.shape[1], device=valid.device)
    last = torch.where(valid, position, -1).argmax(dim=1, keepdim=True)
    return rewards.scatter_add(1, last, scores.float()[:, None])


@torch.no_grad()
def gae(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates and returns (advantages + values), neither whitened.

    Args:
        token_level_rewards, values: [B, R] float32.
        response_mask: [B, R], 1 on tokens the policy wrote. A token with mask 0 contributes nothing, whatever stands
            there: the next value and the running sum are carried through it, without discount.
        gamma, lam: discount and lambda per token.

    Returns:
        (advantages, returns), each [B, R] float32, 0 where the mask is 0. The value after the last token is 0.
    Source: Schulman et al. 2016, eq. 16.
    """
    valid = response_mask.bool()
    rewards, values = (torch.where(valid, x.float(), 0.0) for x in (token_level_rewards, values))
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(len(values))
    running = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(valid[:, t], delta + gamma * lam * running, running)
        next_value = torch.where(valid[:, t], values[:, t], next_value)
        advantages[:, t] = running
    advantages = torch.where(valid, advantages, 0.0)
    return advantages, advantages + values


ESTIMATORS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {"gae": gae}
"""algorithm.adv_estimator -> function."""


def whiten(
    x: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True, *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Scale x to variance 1 (ddof 1) and, with shift_mean, shift it to mean 0, over all tokens with mask 1.

    Args:
        x: [B, R] float32. mask: [B, R].
        shift_mean: False keeps the mean.
        group: ranks whose tokens are taken together; each must call, with its own rows (none is allowed).
            None = the tokens given here alone, even where torch.distributed is initialised.

    Returns:
        (x - mean) * rsqrt(var + 1e-8), [B, R] float32, 0 where the mask is 0.

    Raises:
        ValueError: fewer than two tokens with mask 1, on every rank of the group alike.
    Source: verl's masked_whiten; mean first, then squared distances to it, summed in float64.
    """
    mean, variance = _moments(x, mask, group)
    whitened = (x.double() - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask.bool(), whitened, 0.0).float()


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, group: dist.ProcessGroup | None = None
) -> float:
    """1 - Var(returns - values) / (Var(returns) + 1e-5): 1 = a perfect critic, 0 = no better than a constant.

    Args and Raises: as `whiten`; all [B, R].
    Source: verl's critic/vf_explained_var.
    """
    _, residual = _moments(returns.double() - values.double(), mask, group)
    _, variance = _moments(returns, mask, group)
    return float(1.0 - residual / (variance + 1e-5))


def _moments(x: torch.Tensor, mask: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance (ddof 1) over the tokens with mask 1 of all ranks in `group`, 0-dim float64."""
    valid = mask.bool()
    x = x.detach().double()
    total, count = _sum_over_ranks(torch.stack([torch.where(valid, x, 0.0).sum(), valid.sum().double()]), group)
    if count < 2:
        raise ValueError(f"a variance needs at least 2 tokens with mask 1, got {int(count)}")
    mean = total / count
    squares = torch.where(valid, (x - mean).square(), 0.0).sum()
    return mean, _sum_over_ranks(squares, group) / (count - 1)


def _sum_over_ranks(sums: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums
