"""Policy, value, entropy and KL losses. All tensors [B, R] float32 over padded responses; mask 1 on policy tokens.

Normaliser: every loss and metric is divided by counts of the whole mini-batch, over all data-parallel ranks and
micro-batches (`Normaliser`). What one call returns is then a partial sum: added up over ranks and micro-batches it is
the mini-batch's mean, however that was cut into rows. normaliser=None counts this call's own mask. Metrics are means
over tokens, whatever the loss's aggregation. Whatever stands where the mask is 0, NaN too, reaches neither loss nor
gradient.
"""

import torch

from megappo.ppo.aggregation import AGGREGATIONS, Metrics, Normaliser, agg_mode, aggregate, token_mean
from megappo.ppo.conventions import DEFAULT, Conventions
from megappo.ppo.kl import kl_estimate
from megappo.ppo.surrogate import PolicyConfig, Result, Tokens
from megappo.ppo.value_losses import value_loss

__all__ = [
    "AGGREGATIONS",
    "Metrics",
    "Normaliser",
    "PolicyConfig",
    "Result",
    "Tokens",
    "aggregate",
    "entropy_loss",
    "kl_loss",
    "policy_loss",
    "value_loss",
]


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
) -> Result:
    """The loss that config.policy_loss names.

    Args:
        config: the actor section; `method` is the loss's entry in the table of methods.
        selected: None = chosen as the method does, among this call's own tokens.
        The others: see `Tokens`.

    Returns:
        (loss, metrics): see `clip`.
    """
    method = config.method
    if selected is None and method.select is not None:
        selected = method.select(log_probs, advantages, response_mask, config)
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
    )
    return method.function(tokens, config)


def entropy_loss(
    entropy: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyConfig,
    *,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
) -> tuple[torch.Tensor, Metrics]:
    """The entropy bonus as a loss to add: -config.entropy_coeff x aggregated entropy.

    Args:
        entropy: [B, R] in nats, of the policy's distribution at each response token.
        response_mask, normaliser: as in policy_loss.

    Returns:
        (loss, metrics): entropy, the mean per token.
    """
    normaliser = Normaliser.of(response_mask) if normaliser is None else normaliser
    total = aggregate(entropy, response_mask, agg_mode(config, conventions), normaliser=normaliser)
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
) -> tuple[torch.Tensor, Metrics]:
    """The KL divergence to the reference as a loss to add: config.kl_loss_coef x aggregated estimate.

    Args:
        log_probs, ref_log_probs: [B, R] in nats; only the first gets a gradient.
        config: the actor section; kl_loss_type names the estimator. kl_loss_unbiased multiplies it by the ratio to the
            policy that wrote the tokens, and differentiates that, too: the gradient of k1 and k3 is then unbiased.
        old_log_probs: [B, R] before the update, for kl_loss_unbiased.
        kl: [B, R], KL already computed (over the whole vocabulary, by the model's head) in the estimate's place.
        response_mask, normaliser: as in policy_loss.

    Returns:
        (loss, metrics): kl_loss, the aggregated KL without its coefficient.

    Raises:
        ValueError: unknown kl_loss_type, full without kl=, kl_loss_unbiased without old_log_probs.
    Source: DeepSeekMath (GRPO), eqs. 3 and 4; DeepSeek-AI 2025 (DeepSeek-V3.2), section 3.1, unbiased KL estimate.
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
    total = aggregate(kl, mask, agg_mode(config, conventions), normaliser=normaliser)
    return config.kl_loss_coef * total, {"kl_loss": total.detach().float()}
