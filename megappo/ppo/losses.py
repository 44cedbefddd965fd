"""Policy, value and entropy losses. All tensors [B, R] float32 over padded responses; the mask is 1 on policy tokens.

Normaliser: every loss and metric is divided by `num_tokens`, the number of mask tokens of the whole mini-batch, over
all data-parallel ranks and micro-batches. What one call returns is then a partial sum: added up over ranks and
micro-batches it is the mini-batch's mean, however that was cut. num_tokens=None counts this call's own mask.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Metrics = dict[str, torch.Tensor]
"""Name -> partial sum, 0-dim float32, detached."""

AGGREGATIONS = ("token-mean",)


class PolicyConfig(Protocol):
    """The keys of the actor section that the policy's losses read."""

    @property
    def clip_ratio(self) -> float: ...
    @property
    def clip_ratio_low(self) -> float | None: ...
    @property
    def clip_ratio_high(self) -> float | None: ...
    @property
    def clip_ratio_c(self) -> float | None: ...
    @property
    def entropy_coeff(self) -> float: ...
    @property
    def loss_agg_mode(self) -> str: ...


class ValueConfig(Protocol):
    """The keys of the critic section that the value loss reads."""

    @property
    def value_clip(self) -> float | None: ...
    @property
    def loss_agg_mode(self) -> str: ...


def aggregate(
    loss: torch.Tensor, mask: torch.Tensor, mode: str, *, num_tokens: int | torch.Tensor | None = None
) -> torch.Tensor:
    """Reduce token losses to this call's share of the mini-batch's loss.

    Args:
        loss, mask: [B, R]; losses where the mask is 0 are ignored, whatever they are.
        mode: token-mean = sum over mask tokens / num_tokens.
        num_tokens: mask tokens of the mini-batch (see the module); None = of `mask`.

    Returns:
        0-dim; 0 (still differentiable) where there is no token at all.

    Raises:
        ValueError: unknown mode.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown loss_agg_mode {mode!r}: choose one of {', '.join(AGGREGATIONS)}")
    total = torch.where(mask.bool(), loss, 0.0).sum()
    count = torch.as_tensor(mask.bool().sum() if num_tokens is None else num_tokens, device=loss.device)
    return total / count.clamp(min=1)


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyConfig,
    *,
    rollout_is_weights: torch.Tensor | None = None,
    num_tokens: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """PPO's clipped surrogate, with separate bounds (clip-higher) and, for negative advantages, the dual clip.

    Args:
        log_probs: [B, R] of the policy being trained; the only one that gets a gradient.
        old_log_probs: [B, R] of the policy before the update.
        advantages, response_mask: [B, R].
        config: the actor section. The ratio is clipped to [1 - clip_ratio_low, 1 + clip_ratio_high]; clip_ratio_c
            bounds the loss of a negative advantage A by -c * A, null = no bound.
        rollout_is_weights: [B, R] importance weights, detached and multiplied in after clipping; None = 1.
        num_tokens: the normaliser (see the module).

    Returns:
        (loss, metrics): pg_clipfrac, the fraction of tokens with a clipped ratio; pg_clipfrac_lower, the fraction held
        by the dual clip; ppo_kl, the mean of old_log_probs - log_probs (clamped to +-20, as in the ratio).
    Source: Schulman et al. 2017, eq. 7; Ye et al. 2020 (dual clip), eq. 5; Yu et al. 2025 (DAPO), section 3.1.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    loss, held = _dual_clip(torch.maximum(unclipped, clipped), advantages, config.clip_ratio_c)
    if rollout_is_weights is not None:
        loss = loss * rollout_is_weights.detach()
    metrics = {
        "pg_clipfrac": _fraction(clipped > unclipped, response_mask, num_tokens),
        "pg_clipfrac_lower": _fraction(held, response_mask, num_tokens),
        "ppo_kl": aggregate(-log_ratio.detach(), response_mask, "token-mean", num_tokens=num_tokens),
    }
    return aggregate(loss, response_mask, config.loss_agg_mode, num_tokens=num_tokens), metrics


def _dual_clip(loss: torch.Tensor, advantages: torch.Tensor, bound: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, at most -bound * A where A < 0, and where that held it back."""
    if bound is None:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    limit = -bound * advantages
    negative = advantages < 0
    return torch.where(negative, torch.minimum(loss, limit), loss), negative & (loss > limit)


POLICY_LOSSES: dict[str, Callable[..., tuple[torch.Tensor, Metrics]]] = {"clip": policy_loss}
"""Name -> function with policy_loss's signature."""


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor,
    config: ValueConfig,
    *,
    num_tokens: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Half the squared error to the returns, the larger of the clipped and the unclipped prediction's.

    Args:
        values: [B, R] of the critic being trained; the only one that gets a gradient.
        old_values: [B, R] before the update; values are clipped to old_values +- config.value_clip, null = not clipped.
        returns, response_mask: [B, R].
        config: the critic section.
        num_tokens: the normaliser (see the module).

    Returns:
        (loss, metrics): vf_clipfrac, the fraction of tokens whose clipped error is the larger.
    Source: verl's compute_value_loss; PPO's reference code (openai/baselines ppo2).
    """
    error = (values - returns).square()
    if config.value_clip is None:
        clipped_error = error
    else:
        clipped = torch.clamp(values, old_values - config.value_clip, old_values + config.value_clip)
        clipped_error = (clipped - returns).square()
    metrics = {"vf_clipfrac": _fraction(clipped_error > error, response_mask, num_tokens)}
    loss = 0.5 * torch.maximum(error, clipped_error)
    return aggregate(loss, response_mask, config.loss_agg_mode, num_tokens=num_tokens), metrics


def entropy_loss(
    entropy: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyConfig,
    *,
    num_tokens: int | torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """The entropy bonus as a loss to add: -config.entropy_coeff x mean entropy.

    Args:
        entropy: [B, R] in nats, of the policy's distribution at each response token.
        response_mask, num_tokens: as in policy_loss.

    Returns:
        (loss, metrics): entropy, the mean per token.
    """
    mean = aggregate(entropy, response_mask, config.loss_agg_mode, num_tokens=num_tokens)
    per_token = aggregate(entropy.detach(), response_mask, "token-mean", num_tokens=num_tokens)
    return -config.entropy_coeff * mean, {"entropy": per_token}


def _fraction(flags: torch.Tensor, mask: torch.Tensor, num_tokens: int | torch.Tensor | None) -> torch.Tensor:
    return aggregate(flags.float(), mask, "token-mean", num_tokens=num_tokens)
