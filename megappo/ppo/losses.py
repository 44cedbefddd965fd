"""Value, entropy and KL losses. All tensors [B, R] float32 over padded responses; mask 1 on policy tokens.

Normaliser: these and the policy losses, and their metrics, are divided by counts of the whole mini-batch, over all
data-parallel ranks and micro-batches (`Normaliser`). What one call returns is then a partial sum: added up over ranks
and micro-batches it is the mini-batch's mean, however that was cut into rows. normaliser=None counts this call's own
mask. Metrics are means over tokens, whatever the loss's aggregation. loss_weights, [B], multiply the losses of a row
and change nothing that is divided by: with 0 it has no gradient, and its tokens count. Whatever stands where the mask
is 0, NaN too, reaches neither loss nor gradient.
"""

from typing import Any

import torch

from megappo.ppo.aggregation import Metrics, Normaliser, agg_mode, aggregate, token_mean
from megappo.ppo.conventions import DEFAULT, Conventions
from megappo.ppo.kl import kl_estimate
from megappo.ppo.surrogate import PolicyConfig, Result, Tokens


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyConfig,
    *,
    rollout_is_weights: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
    loss_weights: torch.Tensor | None = None,
) -> Result:
    """The loss that config.policy_loss names, called by hand; runs call it with `Tokens`.

    Args:
        config: the actor section.
        selected: [B, R] bool, the tokens that the loss treats apart; None = as the method chooses among this call's.
        The others: see `Tokens`.

    Returns:
        (loss, metrics): see `megappo.ppo.policy_losses.clip`.
    """
    if selected is None and config.method.select is not None:
        selected = config.method.select(log_probs, advantages, response_mask, config)
    tokens = Tokens(
        log_probs,
        old_log_probs,
        advantages,
        response_mask,
        rollout_is_weights,
        selected=selected,
        normaliser=normaliser,
        conventions=conventions,
        opsm_delta=config.opsm_delta,
        loss_weights=loss_weights,
    )
    return config.method.function(tokens, config)


def entropy_loss(
    entropy: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyConfig,
    *,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
    loss_weights: torch.Tensor | None = None,
) -> Result:
    """The entropy bonus as a loss to add: -config.entropy_coeff x aggregated entropy.

    Args:
        entropy: [B, R] in nats, of the policy's distribution at each response token.
        response_mask, normaliser: see the module.

    Returns:
        (loss, metrics): entropy, the mean per token.
    """
    mode = agg_mode(config, conventions)
    total = aggregate(entropy, response_mask, mode, normaliser=normaliser, loss_weights=loss_weights)
    return -config.entropy_coeff * total, {"entropy": token_mean(entropy, response_mask, normaliser)}


def kl_loss(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyConfig,
    *,
    old_log_probs: torch.Tensor | None = None,
    kl: torch.Tensor | None = None,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
    loss_weights: torch.Tensor | None = None,
) -> Result:
    """The KL divergence to the reference as a loss to add: config.kl_loss_coef x aggregated estimate.

    Args:
        log_probs, ref_log_probs: [B, R] in nats; only the first gets a gradient.
        config: the actor section; kl_loss_type names the estimator. kl_loss_unbiased multiplies it by the ratio to the
            policy that wrote the tokens, and differentiates that, too: the gradient of k1 and k3 is then unbiased.
        old_log_probs: [B, R] before the update, for kl_loss_unbiased.
        kl: [B, R], KL already computed (over the whole vocabulary, by the model's head) in the estimate's place.
        response_mask, normaliser: see the module.

    Returns:
        (loss, metrics): kl_loss, the aggregated KL without its coefficient.

    Raises:
        ValueError: unknown kl_loss_type, full without kl=, kl_loss_unbiased without old_log_probs.
    Source: DeepSeekMath (GRPO), eqs. 3 and 4; DeepSeek-AI 2025 (DeepSeek-V3.2), section 3.1, unbiased KL estimate.
        Conventions.kl_output_clamp bounds the estimate, and the ratio multiplies it then. slime, miles and NeMo-RL
        clamp the product, whose gradient vanishes where it is beyond the bound: where the policy moved most.
    """
    mask = response_mask.bool()
    if kl is None:
        # Cleaned before the estimate: a NaN behind the mask would come back in the gradient as 0 x NaN.
        log_probs, ref_log_probs = (torch.where(mask, x, 0.0) for x in (log_probs, ref_log_probs.detach()))
        kl = kl_estimate(log_probs, ref_log_probs, config.kl_loss_type, conventions=conventions)
        if config.kl_loss_unbiased:
            if old_log_probs is None:
                raise ValueError("kl_loss_unbiased needs old_log_probs")
            limit = conventions.log_ratio_bound
            kl = kl * (log_probs - torch.where(mask, old_log_probs.detach(), 0.0)).clamp(-limit, limit).exp()
    mode = agg_mode(config, conventions)
    total = aggregate(kl, mask, mode, normaliser=normaliser, loss_weights=loss_weights)
    return config.kl_loss_coef * total, {"kl_loss": total.detach().float()}


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any,
    *,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
    loss_weights: torch.Tensor | None = None,
) -> Result:
    """The error to the returns, squared or Huber's: the larger of the clipped and the unclipped prediction's.

    Args:
        values: [B, R] of the critic being trained; the only one that gets a gradient.
        old_values: [B, R] before the update; values are clipped to old_values +- config.value_clip, null = not clipped.
        returns, response_mask: [B, R].
        config: the critic section. huber_delta null: value_loss_factor x e^2. Else Huber's e^2 / 2 up to |e| = delta
            and delta (|e| - delta / 2) beyond, which has its half already: value_loss_factor does not scale it.

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
    metrics: Metrics = {"vf_clipfrac": token_mean(worse > error, mask, normaliser)}
    loss = torch.maximum(error, worse)
    mode = agg_mode(config, conventions)
    return aggregate(loss, mask, mode, normaliser=normaliser, loss_weights=loss_weights), metrics


def _error(difference: torch.Tensor, delta: float | None, conventions: Conventions) -> torch.Tensor:
    if delta is None:
        return conventions.value_loss_factor * difference.square()
    size = difference.abs()
    return torch.where(size <= delta, 0.5 * difference.square(), delta * (size - 0.5 * delta))
