"""Corrections of the mismatch between the engine that sampled and the trainer: one importance weight per token.

Two programs compute the same policy a little differently, so tokens were not drawn from the distribution that the
policy loss assumes. All tensors [B, R] float32 over padded responses; the mask is 1 on policy tokens.

Keys of algorithm.rollout_correction:
level: a token's weight is its own ratio; the product of the ratios of its response (sequence); or their geometric mean.
    none = 1. Log-ratios, or their sum or mean, are clamped to +-20 before exp.
mode: truncate bounds the weight to [threshold_lower or 0, threshold] (TIS; slime's tis_clip_low, tis_clip, NeMo-RL's
    "tis"); mask makes it 0 outside [threshold_lower or 1 / threshold, threshold] (IcePop; slime's icepop_function,
    NeMo-RL's "icepop", verl's rollout_is_threshold "lower_upper").
normalize: divide the bounded weights by their mean over all ranks, of tokens (level token) or of responses, before any
    is rejected (verl's rollout_is_batch_normalize).
reject: divergence -> bound, see `_diverging` (verl's rollout_rs).
reject_geometric: all tokens of a response get weight 0 if its geometric mean is outside these bounds (verl's
    rollout_rs "geometric"; its "seq_mean_k1" bounds 1 / that mean, so that [a, b] here is "1/b_1/a" there; with level
    token and a threshold out of reach, NeMo-RL's "seq-mask-tis").
veto_threshold: likewise where any token's ratio, not clamped, is below it (rollout_token_veto_threshold of verl's
    versions of 2025).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megappo.ppo.kl import FORMULAE
from megappo.ppo.reductions import Unreduced, check_finite, sum_over_ranks

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before exp (verl's SAFETY_BOUND)."""
LOG_RATIOS = {"sequence": "sum", "geometric": "mean"}
"""Level -> reduction of the tokens' log-ratios to their response's."""


@torch.no_grad()
def rollout_is_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: Any,
    *,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Unreduced]:
    """Compute importance weights pi_trainer / pi_engine, bounded, and 0 where a token or response is rejected.

    The policy loss multiplies them in after clipping. A rejected token still counts in that loss's normaliser.

    Args:
        old_log_probs: [B, R] of the trainer, before the update.
        rollout_log_probs: [B, R] of the engine, at the temperature it sampled with.
        response_mask: [B, R], 1 on tokens the policy wrote; values elsewhere are ignored.
        config: algorithm.rollout_correction, see the module.
        group: ranks whose weights are normalised together; each must call, with its own rows (possibly none).

    Returns:
        (weights, metrics): [B, R] float32 without gradient, 0 where the mask is 0; see `_metrics`, of these rows.

    Raises:
        FloatingPointError: log-probs not finite on mask tokens.
    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS); Ling team
        2025, "Every step evolves" (IcePop); Liu, Li et al. 2025, "When speed kills stability" (sequence weights,
        geometric rejection, veto); the numbers of verl's rollout_corr_helper.
    """
    valid = response_mask.bool()
    check_finite("old_log_probs", old_log_probs, valid)
    check_finite("rollout_log_probs", rollout_log_probs, valid)
    log_ratio = torch.where(valid, old_log_probs.double() - rollout_log_probs.double(), 0.0)
    ratio = _ratios(log_ratio, valid, config.level)
    weights, clipped = _weights(ratio, config)
    if config.normalize:
        weights = weights / _mean_weight(weights, valid, config.level, group)
    kept, rejected, vetoed = _kept(log_ratio, valid, config)
    weights = torch.where(kept, weights, 0.0).float()
    flags = {"clipped_frac": clipped} | {f"{name}_frac": tokens for name, tokens in rejected.items()}
    return weights, _metrics(valid, log_ratio, ratio, weights, flags, vetoed)


def _kept(log_ratio: Tensor, valid: Tensor, config: Any) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return the tokens that nothing rejects, [B, R] bool; the tokens that each `reject` rejects; the vetoed responses,
    [B]."""
    lowest = -math.inf if config.veto_threshold is None else math.log(config.veto_threshold)
    vetoed = (valid & (log_ratio < lowest)).any(dim=1)
    rejected = {name: _diverging(log_ratio, valid, name, bound) for name, bound in config.reject.items()}
    kept = valid & ~vetoed[:, None]
    for tokens in rejected.values():
        kept = kept & ~tokens
    if config.reject_geometric is not None:
        kept = kept & ~_outside(_ratios(log_ratio, valid, "geometric"), *config.reject_geometric)
    return kept, rejected, vetoed


def _ratios(log_ratio: Tensor, valid: Tensor, level: str) -> Tensor:
    """Return each token's ratio, or its response's ratio, [B, R]. `log_ratio` is 0 where the mask is 0."""
    if level in LOG_RATIOS:
        log_ratio = _over_response(log_ratio, valid, LOG_RATIOS[level]).expand_as(log_ratio)
    return _bounded(log_ratio).exp()


def _over_response(x: Tensor, valid: Tensor, reduction: str) -> Tensor:
    """Return the sum, mean or max of x over each response's tokens, [B, 1]. x is 0 where the mask is 0."""
    if reduction == "max":
        return torch.where(valid, x, -math.inf).amax(dim=1, keepdim=True)
    total = x.sum(dim=1, keepdim=True)
    return total / valid.sum(dim=1, keepdim=True).clamp(min=1) if reduction == "mean" else total


def _weights(ratio: Tensor, config: Any) -> tuple[Tensor, Tensor]:
    """Return the weights within the thresholds, and a mask of the weights that a threshold changed."""
    if config.level == "none":
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    if config.mode == "truncate":
        weights = ratio.clamp(min=config.threshold_lower, max=config.threshold)
        return weights, weights != ratio
    lower = 1.0 / config.threshold if config.threshold_lower is None else config.threshold_lower
    clipped = _outside(ratio, lower, config.threshold)
    return torch.where(clipped, 0.0, ratio), clipped


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _outside(values: Tensor, lower: float, upper: float) -> Tensor:
    return (values < lower) | (values > upper)


def _mean_weight(
    weights: Tensor,
    valid: Tensor,
    level: str,
    group: ProcessGroup | None,
) -> Tensor:
    """Return the mean over all ranks' tokens, or over responses where each has one weight; 1 if all weights are 0."""
    shares = valid.double()
    if level != "token":
        shares = shares / shares.sum(dim=1, keepdim=True).clamp(min=1)
    total, count = sum_over_ranks(torch.stack([(weights * shares).sum(), shares.sum()]), group)
    return torch.where(total > 1e-8 * count, total / count, 1.0)


def _diverging(
    log_ratio: Tensor,
    valid: Tensor,
    name: str,
    bound: float | tuple[float, float],
) -> Tensor:
    """Return a mask, [B, R] bool, of the tokens whose divergence, or their response's, is outside of its bounds.

    Args:
        name: token, or the seq_sum, seq_mean or seq_max over the tokens of a response, of a divergence. With x the
            log-ratio clamped to +-20: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x.
        bound: the largest; for k1 two bounds of e^k1, a single number u standing for 1 / u and u.
    Source: the options of verl's rollout_rs; Schulman, "Approximating KL divergence" (2020).
    """
    level, _, kind = name.rpartition("_")
    divergence = torch.where(valid, FORMULAE[kind](_bounded(log_ratio)), 0.0)
    if level != "token":
        divergence = _over_response(divergence, valid, level.removeprefix("seq_"))
    low, high = bound if isinstance(bound, tuple) else (1 / bound, bound)
    low, high = (math.log(low), math.log(high)) if kind == "k1" else (-math.inf, high)
    return valid & _outside(divergence, low, high)


def _metrics(
    valid: Tensor,
    log_ratio: Tensor,
    ratio: Tensor,
    weights: Tensor,
    flags: dict[str, Tensor],
    vetoed: Tensor,
) -> Unreduced:
    """Return the metrics `rollout_is/<name>`, over the tokens with mask 1.

    mean, max, min: taken over the weights before bounds and rejection (level none: the tokens' ratios).
    clipped_frac: tokens whose weight a threshold capped or made 0. <name>_frac: tokens that this `reject` rejects.
    rejected_frac: responses with no weight above 0, for any reason. veto_frac: responses with a vetoed token.
    ess: effective sample size of the weights returned, (sum w)^2 / (n sum w^2); 1 = all equal, 0 = all rejected.
    kl: E[log rollout - log old], the k1 estimate of KL(rollout, old), not clamped.
    k3: E[r - 1 - log r] with r = old / rollout, the k3 estimate of the same.
    kl_reverse: E[r log r], KL(old, rollout): its expectation under the trainer, reweighted by r because the
    tokens come from the engine; may be negative on few tokens.
    """
    ratio = ratio[valid]
    log_ratio = log_ratio[valid]
    bounded = _bounded(log_ratio)
    present = valid.any(dim=1)
    found = {
        "mean": (ratio, "mean"),
        "max": (ratio, "max"),
        "min": (ratio, "min"),
        **{name: (flag[valid], "mean") for name, flag in flags.items()},
        "rejected_frac": (~(weights > 0).any(dim=1)[present], "mean"),
        "veto_frac": (vetoed[present], "mean"),
        "ess": (weights[valid], "ess"),
        "kl": (-log_ratio, "mean"),
        "k3": (FORMULAE["k3"](bounded), "mean"),
        "kl_reverse": (bounded.exp() * bounded, "mean"),
    }
    return {f"rollout_is/{name}": part for name, part in found.items()}
