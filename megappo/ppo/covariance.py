"""Policy losses that treat the tokens with a high covariance of advantage and log-prob apart: Clip-Cov and KL-Cov.

Those tokens are what drives the policy's entropy down. They are a share of the whole mini-batch's tokens, so the choice
is made over all its data-parallel ranks, before it is cut into micro-batches.
"""

import math

import torch
import torch.distributed as dist

from megappo.ppo.surrogate import PolicyConfig, Result, Tokens, clipped_surrogate


def select_for_clip_cov(
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyConfig,
    *,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Choose the tokens of a mini-batch that clip_cov takes out of the gradient.

    The covariance of a token is (A - mean A) x (log_prob - mean log_prob), with means over the mini-batch's tokens.
    Chosen are the max(1, floor(clip_cov_ratio x tokens)) largest of those with clip_cov_lb < covariance < clip_cov_ub;
    none with a ratio of 0. The paper and verl draw them at random inside the band; the largest come first here, so that
    the choice depends neither on the cut into ranks and micro-batches nor on a seed. Ties are common (a sure token has
    log_prob 0) and are broken by the sum of the row's log-probs, then by the position, earlier first.

    Args:
        log_probs, advantages, response_mask: [B, R]; whole rows.
        config: the actor section.
        group: ranks whose rows make up the mini-batch; each must call, with its own rows (none is allowed). None =
            these rows alone.

    Returns:
        [B, R] bool; nothing where the mini-batch has no token.

    Raises:
        FloatingPointError: on all ranks alike, values on mask tokens that are not finite.
    Source: Cui et al. 2025 (The Entropy Mechanism of RL for Reasoning LMs), section 4.2.
    """
    band = config.clip_cov_lb, config.clip_cov_ub
    return _select(log_probs, advantages, response_mask, config.clip_cov_ratio, band, group)


def select_for_kl_cov(
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyConfig,
    *,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Choose the tokens of a mini-batch that kl_cov gives a KL penalty: the kl_cov_ratio of them with the largest
    covariance, whatever it is; otherwise as `select_for_clip_cov`."""
    return _select(log_probs, advantages, response_mask, config.kl_cov_ratio, (-math.inf, math.inf), group)


def clip_cov(tokens: Tokens, config: PolicyConfig) -> Result:
    """Clip-Cov: PPO's clip, and the selected tokens give no gradient.

    Args and Returns: as `clip`; clip_ratio_c is not read (no dual clip).
    The loss of a selected token is 0, unless its ratio is clipped already: that keeps its constant, as in verl (which
    leaves those out of the draw, too).
    pg_clipfrac is the fraction of tokens set to 0, as in verl. log_ratio_clamp bounds the log-ratio (verl: nothing
    does, for this loss).
    Source: Cui et al. 2025, section 4.2; verl's compute_policy_loss_clip_cov.
    """
    ratios = tokens.ratios()
    loss, clipped = clipped_surrogate(tokens.advantages, ratios, config)
    taken_out = tokens.selected & ~clipped & tokens.mask
    loss = torch.where(taken_out, 0.0, loss)
    return tokens.result(tokens.weighted(loss), config, ratios=ratios, clipped=taken_out)


def kl_cov(tokens: Tokens, config: PolicyConfig) -> Result:
    """KL-Cov: the unclipped surrogate -A x ratio, plus ppo_kl_coef x |log-ratio| at the selected tokens.

    Args and Returns: as `clip`; the clip bounds are not read and nothing counts as clipped. ppo_kl is signed, as
    everywhere here (verl reports the mean of |log-ratio| for this loss). log_ratio_clamp bounds the log-ratio before
    exp, but not in the penalty (verl: nowhere).
    Source: Cui et al. 2025, section 4.2; verl's compute_policy_loss_kl_cov.
    """
    ratios = tokens.ratios()
    penalty = torch.where(tokens.selected, config.ppo_kl_coef * tokens.log_ratios.abs(), 0.0)
    loss = -tokens.advantages * ratios + penalty
    return tokens.result(tokens.weighted(loss), config, ratios=ratios)


@torch.no_grad()
def _select(
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    share: float,
    band: tuple[float, float],
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    valid = mask.bool()
    log_probs, advantages = (torch.where(valid, x.double(), 0.0) for x in (log_probs, advantages))
    sums = torch.stack([advantages.sum(), log_probs.sum(), valid.sum().double()])
    every = _gather(sums, group)
    total_advantage, total_log_prob, count = every.sum(dim=0).tolist()
    if not count or not share:
        return torch.zeros_like(valid)
    if not math.isfinite(total_advantage) or not math.isfinite(total_log_prob):
        raise FloatingPointError("no covariance: log_probs or advantages of tokens with mask 1 are not finite")
    covariance = (advantages - total_advantage / count) * (log_probs - total_log_prob / count)
    low, high = band
    wanted = max(1, int(share * count))
    room = min(wanted, int(every[:, 2].max()))
    return _largest(covariance, log_probs, valid & (covariance > low) & (covariance < high), wanted, room, group)


def _largest(
    covariance: torch.Tensor,
    log_probs: torch.Tensor,
    eligible: torch.Tensor,
    wanted: int,
    room: int,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """The `wanted` first of all ranks' eligible tokens, as a mask; a rank has at most `room` of them."""
    rows, positions = eligible.nonzero(as_tuple=True)
    keys = torch.stack([covariance[rows, positions], log_probs.sum(dim=1)[rows], -positions.double()], dim=1)
    best = _descending(keys)[:room]
    table = keys.new_full((room, 3), float("-inf"))
    table[: len(best)] = keys[best]
    tables = _gather(table, group).flatten(0, 1)
    first = _descending(tables)[:wanted]
    first = first[tables[first, 0] > float("-inf")]
    start = 0 if group is None else dist.get_rank(group) * room
    mine = best[first[(first >= start) & (first < start + room)] - start]
    selected = torch.zeros_like(eligible)
    selected[rows[mine], positions[mine]] = True
    return selected


def _descending(keys: torch.Tensor) -> torch.Tensor:
    """Indices that sort rows of keys, the first column counting most, largest first; equal rows keep their order."""
    order = torch.arange(len(keys), device=keys.device)
    for column in reversed(range(keys.shape[1])):
        order = order[keys[order, column].argsort(descending=True, stable=True)]
    return order


def _gather(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """[ranks, ...]: every rank's x, in the order of ranks."""
    if group is None:
        return x[None]
    every = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x, group=group)
    return torch.stack(every)
