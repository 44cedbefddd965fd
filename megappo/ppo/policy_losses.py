"""Policy losses whose ratio belongs to a token: PPO's clip, CISPO, SAPO, GPG. All tensors [B, R] float32."""

import torch

from megappo.ppo.aggregation import Normaliser
from megappo.ppo.conventions import DEFAULT, Conventions
from megappo.ppo.surrogate import PolicyConfig, Result, Tokens, clip_range, clipped_surrogate


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyConfig,
    *,
    rollout_is_weights: torch.Tensor | None = None,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
) -> Result:
    """PPO's clipped surrogate, with separate bounds (clip-higher) and, for negative advantages, the dual clip.

    Args:
        log_probs: [B, R] of the policy being trained; the only one that gets a gradient.
        old_log_probs: [B, R] of the policy before the update.
        advantages, response_mask: [B, R].
        config: the actor section. The ratio is clipped to [1 - clip_ratio_low, 1 + clip_ratio_high]; clip_ratio_c
            bounds the loss of a negative advantage A by -c * A, null = no bound.
        rollout_is_weights: [B, R] importance weights, detached and multiplied in after clipping; None = 1.
        normaliser: of the mini-batch; None = counted from response_mask.
        conventions: its log_ratio_clamp bounds the log-ratio before exp.

    Returns:
        (loss, metrics): pg_clipfrac, the fraction of tokens with a clipped ratio; pg_clipfrac_lower, the fraction held
        by the dual clip; ppo_kl, the mean of old_log_probs - log_probs (clamped as in the ratio); ratio, its mean.
    Source: Schulman et al. 2017, eq. 7; Ye et al. 2020 (dual clip), eq. 5; Yu et al. 2025 (DAPO), section 3.1.
    """
    tokens = Tokens(log_probs, old_log_probs, advantages, response_mask, rollout_is_weights, normaliser, conventions)
    ratios = tokens.ratios()
    loss, clipped = clipped_surrogate(tokens.advantages, ratios, config)
    loss, held = _dual_clip(loss, tokens.advantages, config.clip_ratio_c)
    return tokens.result(tokens.weighted(loss), config, ratios=ratios, clipped=clipped, held=held)


def _dual_clip(loss: torch.Tensor, advantages: torch.Tensor, bound: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, at most -bound * A where A < 0, and where that held it back."""
    if bound is None:
        return loss, torch.zeros_like(loss, dtype=torch.bool)
    limit = -bound * advantages
    negative = advantages < 0
    return torch.where(negative, torch.minimum(loss, limit), loss), negative & (loss > limit)


def cispo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyConfig,
    *,
    rollout_is_weights: torch.Tensor | None = None,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
) -> Result:
    """CISPO: -clip(ratio), detached, x A x log_prob, so that a clipped token keeps a gradient.

    Args and Returns: as `policy_loss`; clip_ratio_c is not read. pg_clipfrac counts ratios outside the clip range, for
    either sign of A.
    Source: MiniMax-M1 (2025), eqs. 4 and 5; the paper trains without the lower bound (clip_ratio_low >= 1 here).
    """
    tokens = Tokens(log_probs, old_log_probs, advantages, response_mask, rollout_is_weights, normaliser, conventions)
    low, high = clip_range(config)
    ratios = tokens.ratios().detach()
    kept = ratios.clamp(1.0 - low, 1.0 + high)
    loss = -kept * tokens.advantages * tokens.log_probs
    return tokens.result(tokens.weighted(loss), config, ratios=ratios, clipped=kept != ratios)


def sapo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyConfig,
    *,
    rollout_is_weights: torch.Tensor | None = None,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
) -> Result:
    """SAPO: -A x 4 / tau x sigmoid(tau (ratio - 1)), a soft gate in the clip's place.

    Args and Returns: as `policy_loss`; the clip bounds are not read and nothing counts as clipped. tau is tau_pos where
    A > 0, else tau_neg. A loss_agg_mode of null is seq-mean-token-mean, the paper's; verl takes that always.
    Source: Gao et al. 2025 (Soft Adaptive Policy Optimization), eqs. 5 and 6.
    """
    tokens = Tokens(log_probs, old_log_probs, advantages, response_mask, rollout_is_weights, normaliser, conventions)
    ratios = tokens.ratios()
    taus = torch.where(tokens.advantages > 0, config.tau_pos, config.tau_neg)
    loss = -tokens.advantages * torch.sigmoid(taus * (ratios - 1.0)) * (4.0 / taus)
    return tokens.result(tokens.weighted(loss), config, ratios=ratios, method_agg_mode="seq-mean-token-mean")


def gpg(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: PolicyConfig,
    *,
    rollout_is_weights: torch.Tensor | None = None,
    normaliser: Normaliser | None = None,
    conventions: Conventions = DEFAULT,
) -> Result:
    """GPG: -log_prob x A, the plain policy gradient.

    Args and Returns: as `policy_loss`; old_log_probs only serve the metrics ppo_kl and ratio; nothing is clipped.
    Source: Chu et al. 2025 (Group Policy Gradient); verl's compute_policy_loss_gpg.
    """
    tokens = Tokens(log_probs, old_log_probs, advantages, response_mask, rollout_is_weights, normaliser, conventions)
    loss = -tokens.log_probs * tokens.advantages
    return tokens.result(tokens.weighted(loss), config, ratios=tokens.ratios())
