"""Policy, value, entropy and KL losses. All tensors [B, R] float32 over padded responses; mask 1 on policy tokens.

Normaliser: losses and their metrics are divided by counts of the whole mini-batch, over all data-parallel ranks and
micro-batches (`Normaliser`). One call returns a partial sum: added up over ranks and micro-batches it is the
mini-batch's mean, however that was cut into rows. normaliser=None counts this call's own mask. Metrics are means over
tokens, whatever the loss's aggregation. loss_weights, [B], multiply the losses of a row but not the counts: a row with
weight 0 has no gradient, and its tokens count. Values at mask 0, NaN too, reach neither loss nor gradient.
"""

from typing import Any

import torch
from torch import Tensor

from megappo.ppo.conventions import DEFAULT, Conventions
from megappo.ppo.kl import kl_estimate
from megappo.ppo.policy_losses import PolicyConfig, PolicyInputs, Result
from megappo.ppo.reductions import Metrics, Normaliser, agg_mode, aggregate, token_mean
from megappo.ppo.value_losses import ValueInputs


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: PolicyConfig,
    *,
    selected: Tensor | None = None,
    **options: Any,
) -> Result:
    """Compute the loss that config.policy_loss names.

    Args:
        log_probs: [B, R] of the policy being trained; the only input that gets a gradient.
        old_log_probs: [B, R] of the policy before the update.
        advantages, response_mask: [B, R].
        config: the actor section.
        selected: [B, R] bool, the tokens that the loss treats separately; None = selected from this call's tokens.
        options: rollout_is_weights and turns [B, R], normaliser, conventions and loss_weights [B], all optional: see
            `PolicyInputs`.

    Returns:
        (loss, metrics): see `megappo.ppo.policy_losses.clip`.
    """
    if selected is None and config.method.select is not None:
        selected = config.method.select(log_probs, advantages, response_mask, config)
    inputs = PolicyInputs(
        log_probs,
        old_log_probs,
        advantages,
        response_mask,
        selected=selected,
        opsm_delta=config.opsm_delta,
        **options,
    )
    return config.method.function(inputs, config)


def policy_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    *,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
) -> Tensor:
    """Estimate KL(policy before the update, policy being trained), 0-dim float32, detached.

    It is this call's share of the mean over tokens of old_log_probs - log_probs, clamped by log_ratio_clamp.
    """
    limit = conventions.log_ratio_bound
    differences = torch.where(response_mask.bool(), log_probs.detach() - old_log_probs, 0.0).clamp(-limit, limit)
    return token_mean(-differences, response_mask, normaliser)


def entropy_loss(
    entropy: Tensor,
    response_mask: Tensor,
    config: PolicyConfig,
    *,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
    loss_weights: Tensor | None = None,
) -> Result:
    """Compute the entropy bonus as a loss to add: -config.entropy_coeff x aggregated entropy.

    Args:
        entropy: [B, R] in nats, of the policy's distribution at each response token.
        response_mask, normaliser: see the module.

    Returns:
        (loss, metrics): entropy, the mean per token.
    """
    mode = agg_mode(config, conventions)
    total = aggregate(
        entropy,
        response_mask,
        mode,
        normaliser=normaliser,
        loss_weights=loss_weights,
    )
    return -config.entropy_coeff * total, {"entropy": token_mean(entropy, response_mask, normaliser)}


def kl_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    config: PolicyConfig,
    *,
    old_log_probs: Tensor | None = None,
    kl: Tensor | None = None,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
    loss_weights: Tensor | None = None,
) -> Result:
    """Compute the KL to the reference as a loss to add: config.kl_loss_coef x aggregated estimate.

    Args:
        log_probs, ref_log_probs: [B, R] in nats; only the first gets a gradient.
        config: the actor section; kl_loss_type names the estimator. kl_loss_unbiased multiplies it by the ratio to the
            policy that wrote the tokens and differentiates the ratio, too: the gradient of k1 and k3 is then unbiased.
        old_log_probs: [B, R] before the update, for kl_loss_unbiased.
        kl: [B, R], KL that the model's head computed over the whole vocabulary, in place of the estimate.
        response_mask, normaliser: see the module.

    Returns:
        (loss, metrics): kl_loss, the aggregated KL without its coefficient.

    Raises:
        ValueError: unknown kl_loss_type, full without kl=, kl_loss_unbiased without old_log_probs.
    Source: DeepSeekMath (GRPO), eqs. 3 and 4; DeepSeek-AI 2025 (DeepSeek-V3.2), section 3.1, unbiased KL estimate.
        Conventions.kl_output_clamp bounds the estimate before the ratio multiplies it.
    """
    mask = response_mask.bool()
    if kl is None:
        # Masked before the estimate: a NaN behind the mask would come back in the gradient as 0 x NaN.
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
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    config: Any,
    *,
    errors: Tensor | None = None,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
    loss_weights: Tensor | None = None,
) -> Result:
    """Compute config.value_loss: the larger of the clipped and the unclipped value's error, if the loss has a clip.

    Args:
        values: [B, R] of the critic being trained; the only input that gets a gradient.
        old_values: [B, R] before the update; values are clipped to old_values +- config.value_clip, null = not clipped.
        returns, response_mask: [B, R].
        config: the critic section.
        errors: [B, R], in place of the error of the values: a head of several outputs has computed the token losses
            from these. values are then not read.

    Returns:
        (loss, metrics): vf_clipfrac, the fraction of tokens whose clipped error is the larger.
    Source: verl's compute_value_loss; PPO's reference code (openai/baselines ppo2); Huber with clip as in RLinf.
    """
    mask = response_mask.bool()
    metrics: Metrics = {}
    if errors is None:
        # Masked before the arithmetic: a NaN behind the mask would come back in the gradient as 0 x NaN.
        inputs = (values, old_values.detach(), returns.detach())
        values, old_values, returns = (torch.where(mask, x, 0.0) for x in inputs)
        errors = worse = _error(values, returns, config, conventions)
        if config.value_clip is not None and "value_clip" in config.method.reads:
            clipped = torch.clamp(values, old_values - config.value_clip, old_values + config.value_clip)
            worse = _error(clipped, returns, config, conventions)
        metrics["vf_clipfrac"] = token_mean(worse > errors, mask, normaliser)
        errors = torch.maximum(errors, worse)
    mode = agg_mode(config, conventions)
    return aggregate(
        errors,
        mask,
        mode,
        normaliser=normaliser,
        loss_weights=loss_weights,
    ), metrics


def _error(values: Tensor, returns: Tensor, config: Any, conventions: Conventions) -> Tensor:
    return config.method.function(ValueInputs(values[..., None], returns, conventions=conventions), config)
