"""Policy losses that treat tokens with a high covariance of advantage and log-prob separately: Clip-Cov and KL-Cov.

Those tokens drive the policy's entropy down. They are a share of the whole mini-batch's tokens, so they are selected
over all its data-parallel ranks, before it is cut into micro-batches.
"""

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from megappo.ppo.policy_losses import PolicyConfig, PolicyInputs, Result, clipped_surrogate
from megappo.ppo.reductions import gather_over_ranks


def select_for_clip_cov(
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: PolicyConfig,
    *,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Select the tokens of a mini-batch that clip_cov takes out of the gradient.

    The covariance of a token is (A - mean A) x (log_prob - mean log_prob), with means over the mini-batch's tokens.
    The max(1, floor(clip_cov_ratio x tokens)) largest with clip_cov_lb < covariance < clip_cov_ub are selected; none
    with a ratio of 0. The choice depends neither on the cut into ranks and micro-batches nor on a seed. Ties are common
    (a sure token has log_prob 0) and are broken by the sum of the row's log-probs, then by the position, earlier first.

    Args:
        log_probs, advantages, response_mask: [B, R]; whole rows.
        config: the actor section.
        group: ranks whose rows make up the mini-batch; each must call, with its own rows (possibly none).
            None = these rows alone.

    Returns:
        [B, R] bool; all False where the mini-batch has no token.

    Raises:
        FloatingPointError: on all ranks alike, values on mask tokens that are not finite.
    Source: Cui et al. 2025 (The Entropy Mechanism of RL for Reasoning LMs), section 4.2.
    """
    band = config.clip_cov_lb, config.clip_cov_ub
    return _select(log_probs, advantages, response_mask, config.clip_cov_ratio, band, group)


def select_for_kl_cov(
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: PolicyConfig,
    *,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Select the tokens of a mini-batch that kl_cov gives a KL penalty: the share kl_cov_ratio with the largest
    covariance, without a band; otherwise as `select_for_clip_cov`."""
    return _select(log_probs, advantages, response_mask, config.kl_cov_ratio, (-math.inf, math.inf), group)


def clip_cov(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """Clip-Cov: PPO's clip, and the selected tokens give no gradient.

    Args and Returns: as `clip`; clip_ratio_c is not read (no dual clip).
    The loss of a selected token is 0, unless its ratio is clipped already: then it keeps its constant loss.
    pg_clipfrac is the fraction of tokens set to 0. log_ratio_clamp bounds the log-ratio.
    Source: Cui et al. 2025, section 4.2; verl's compute_policy_loss_clip_cov.
    """
    ratios = inputs.ratios()
    loss, clipped = clipped_surrogate(inputs.advantages, ratios, config)
    taken_out = inputs.selected & ~clipped & inputs.mask
    loss = torch.where(taken_out, 0.0, loss)
    return inputs.result(inputs.weighted(loss), config, ratios=ratios, clipped=taken_out)


def kl_cov(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """KL-Cov: the unclipped surrogate -A x ratio, plus ppo_kl_coef x |log-ratio| at the selected tokens.

    Args and Returns: as `clip`; the clip bounds are not read and nothing counts as clipped. log_ratio_clamp bounds the
    log-ratio before exp, but not in the penalty.
    Source: Cui et al. 2025, section 4.2; verl's compute_policy_loss_kl_cov.
    """
    ratios = inputs.ratios()
    penalty = torch.where(inputs.selected, config.ppo_kl_coef * inputs.log_ratios.abs(), 0.0)
    loss = -inputs.advantages * ratios + penalty
    return inputs.result(inputs.weighted(loss), config, ratios=ratios)


@torch.no_grad()
def _select(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    share: float,
    band: tuple[float, float],
    group: ProcessGroup | None,
) -> Tensor:
    valid = mask.bool()
    log_probs, advantages = (torch.where(valid, x.double(), 0.0) for x in (log_probs, advantages))
    sums = torch.stack([advantages.sum(), log_probs.sum(), valid.sum().double()])
    sums_of_ranks = gather_over_ranks(sums, group)
    total_advantage, total_log_prob, count = sums_of_ranks.sum(dim=0).tolist()
    if not count or not share:
        return torch.zeros_like(valid)
    if not math.isfinite(total_advantage) or not math.isfinite(total_log_prob):
        raise FloatingPointError("no covariance: log_probs or advantages of tokens with mask 1 are not finite")
    covariance = (advantages - total_advantage / count) * (log_probs - total_log_prob / count)
    eligible = valid & (covariance > band[0]) & (covariance < band[1])
    rows, positions = eligible.nonzero(as_tuple=True)
    keys = torch.stack([covariance[rows, positions], log_probs.sum(dim=1)[rows], -positions.double()], dim=1)
    # Every rank's keys, below one another, in as many lines as the rank with the most tokens needs.
    num_lines = int(sums_of_ranks[:, 2].max())
    table = pad(keys, (0, 0, 0, num_lines - len(keys)), value=-math.inf)
    tables = gather_over_ranks(table, group).flatten(0, 1)
    first = 0 if group is None else group.rank() * num_lines
    largest = _descending(tables)[: max(1, int(share * count))] - first
    own = largest[(largest >= 0) & (largest < len(keys))]
    selected = torch.zeros_like(eligible)
    selected[rows[own], positions[own]] = True
    return selected


def _descending(keys: Tensor) -> Tensor:
    """Return indices that sort rows of keys, largest first, by the first column first; equal rows keep their order."""
    order = torch.arange(len(keys), device=keys.device)
    for column in reversed(range(keys.shape[1])):
        order = order[keys[order, column].argsort(descending=True, stable=True)]
    return order
