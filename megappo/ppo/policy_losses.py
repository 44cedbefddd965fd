"""Policy losses whose ratio belongs to a token: PPO's clip, CISPO, SAPO, GPG. All tensors [B, R] float32."""

import torch

from megappo.ppo.surrogate import PolicyConfig, Result, Tokens, clip_range, clipped_surrogate


def clip(tokens: Tokens, config: PolicyConfig) -> Result:
    """PPO's clipped surrogate, with separate bounds (clip-higher) and, for negative advantages, the dual clip.

    Args:
        tokens: see `Tokens`.
        config: the actor section. The ratio is clipped to [1 - clip_ratio_low, 1 + clip_ratio_high]; clip_ratio_c
            bounds the loss of a negative advantage A by -c * A, null = no bound.

    Returns:
        (loss, metrics): pg_clipfrac, the fraction of tokens with a clipped ratio; pg_clipfrac_lower, the fraction held
        by the dual clip; ppo_kl, the mean of old_log_probs - log_probs (clamped as in the ratio); ratio, its mean.
    Source: Schulman et al. 2017, eq. 7; Ye et al. 2020 (dual clip), eq. 5; Yu et al. 2025 (DAPO), section 3.1.
    """
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


def cispo(tokens: Tokens, config: PolicyConfig) -> Result:
    """CISPO: -clip(ratio), detached, x A x log_prob, so that a clipped token keeps a gradient.

    Args and Returns: as `clip`; clip_ratio_c is not read. pg_clipfrac counts ratios outside the clip range, for
    either sign of A.
    Source: MiniMax-M1 (2025), eqs. 4 and 5; the paper trains without the lower bound (clip_ratio_low >= 1 here).
    """
    low, high = clip_range(config)
    ratios = tokens.ratios().detach()
    kept = ratios.clamp(1.0 - low, 1.0 + high)
    loss = -kept * tokens.advantages * tokens.log_probs
    return tokens.result(tokens.weighted(loss), config, ratios=ratios, clipped=kept != ratios)


def sapo(tokens: Tokens, config: PolicyConfig) -> Result:
    """SAPO: -A x 4 / tau x sigmoid(tau (ratio - 1)), a soft gate in the clip's place.

    Args and Returns: as `clip`; the clip bounds are not read and nothing counts as clipped. tau is tau_pos where
    A > 0, else tau_neg. A loss_agg_mode of null is seq-mean-token-mean, the paper's; verl takes that always.
    Source: Gao et al. 2025 (Soft Adaptive Policy Optimization), eqs. 5 and 6.
    """
    ratios = tokens.ratios()
    taus = torch.where(tokens.advantages > 0, config.tau_pos, config.tau_neg)
    loss = -tokens.advantages * torch.sigmoid(taus * (ratios - 1.0)) * (4.0 / taus)
    return tokens.result(tokens.weighted(loss), config, ratios=ratios)


def gpg(tokens: Tokens, config: PolicyConfig) -> Result:
    """GPG: -log_prob x A, the plain policy gradient.

    Args and Returns: as `clip`; old_log_probs only serve the metrics ppo_kl and ratio; nothing is clipped.
    Source: Chu et al. 2025 (Group Policy Gradient); verl's compute_policy_loss_gpg.
    """
    loss = -tokens.log_probs * tokens.advantages
    return tokens.result(tokens.weighted(loss), config, ratios=tokens.ratios())
