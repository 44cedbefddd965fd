"""The critic's loss. All tensors [B, R] float32; the mask is 1 on policy tokens."""

from typing import Any

import torch

from megappo.ppo.aggregation import Metrics, Normaliser, agg_mode, aggregate, token_mean
from megappo.ppo.conventions import DEFAULT, Conventions


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    *,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
) -> tuple[torch.Tensor, Metrics]:
    """The error to the returns, squared or Huber's: the larger of the clipped and the unclipped prediction's.

    Args:
        values: [B, R] of the critic being trained; the only one that gets a gradient.
        old_values: [B, R] before the update; values are clipped to old_values +- config.value_clip, null = not clipped.
        returns, response_mask: [B, R].
        config: the critic section. huber_delta null: value_loss_factor x e^2. Else Huber's e^2 / 2 up to |e| = delta
            and delta (|e| - delta / 2) beyond, which has its half already: value_loss_factor does not scale it.
        normaliser: of the mini-batch; None = counted from response_mask.

    Returns:
        (loss, metrics): vf_clipfrac, the fraction of tokens whose clipped error is the larger.
    Source: verl's compute_value_loss; PPO's reference code (openai/baselines ppo2); Huber with clip as in RLinf.
    """
    mask = response_mask.bool()
    # Cleaned before the arithmetic: a NaN behind the mask would come back in the gradient as 0 x NaN.
    values, old_values, returns = (torch.where(mask, x, 0.0) for x in (values, old_values.detach(), returns.detach()))
    error = _error(values - returns, config.huber_delta, conventions)
    worse = error
    if config.value_clip is not None:
        clipped = torch.clamp(values, old_values - config.value_clip, old_values + config.value_clip)
        worse = _error(clipped - returns, config.huber_delta, conventions)
    normaliser = Normaliser.of(mask) if normaliser is None else normaliser
    metrics: Metrics = {"vf_clipfrac": token_mean(worse > error, mask, normaliser)}
    loss = torch.maximum(error, worse)
    return aggregate(loss, mask, agg_mode(config, conventions), normaliser=normaliser), metrics


def _error(difference: torch.Tensor, delta: float | None, conventions: Conventions) -> torch.Tensor:
    if delta is None:
        return conventions.value_loss_factor * difference.square()
    size = difference.abs()
    return torch.where(size <= delta, 0.5 * difference.square(), delta * (size - 0.5 * delta))
