"""Policy losses held back by a divergence of the policies, not by a clipped ratio: DPPO, DRO. All [B, R] float32."""

import torch

from megappo.ppo.surrogate import PolicyConfig, Result, Tokens, clip_range


def dppo_tv(tokens: Tokens, config: PolicyConfig) -> Result:
    """DPPO with the binary total variation: a token is left out once its probability moved too far the way A wants.

    The loss is -min(ratio, clip_ratio_c), detached, x A x log_prob; 0 where A > 0 and p - p_old > clip_ratio_high, or
    A <= 0 and p_old - p > clip_ratio_low, with p and p_old the token's probabilities.

    Args and Returns: as `clip`; clip_ratio_c null = the ratio is not truncated; the paper advises a large one (verl's
    default is 3.0, its example's 10000). pg_clipfrac is the fraction of tokens left out, pg_clipfrac_lower of those
    kept with a truncated ratio.
    Source: Qi et al. 2026 (Rethinking the Trust Region in LLM RL, arXiv 2602.04879), DPPO-Binary-TV; verl's
        compute_policy_loss_dppo_tv.
    """
    low, high = clip_range(config)
    new, old = _log_probs(tokens)
    moved = new.exp() - old.exp()
    return _trusted(tokens, config, torch.where(tokens.advantages > 0, moved <= high, moved >= -low))


def dppo_kl(tokens: Tokens, config: PolicyConfig) -> Result:
    """DPPO with the binary KL: as `dppo_tv`, by the KL(old, new) of the two outcomes "this token" and "another".

    A token is left out where it is above clip_ratio_high (A > 0, p > p_old) or clip_ratio_low (A <= 0, p < p_old).

    Args and Returns: as `dppo_tv`.
    Source: as `dppo_tv`, DPPO-Binary-KL; verl's compute_policy_loss_dppo_kl with its 1e-8.
    """
    low, high = clip_range(config)
    new, old = _log_probs(tokens)
    p, p_old = new.exp(), old.exp()
    kl = p_old * (old - new) + (1 - p_old) * torch.log((1 - p_old + 1e-8) / (1 - p + 1e-8))
    up = (kl <= high) | (p <= p_old)
    down = (kl <= low) | (p >= p_old)
    return _trusted(tokens, config, torch.where(tokens.advantages > 0, up, down))


def dro(tokens: Tokens, config: PolicyConfig) -> Result:
    """DRO: -log_prob x A + dro_beta / 2 x log-ratio^2, a quadratic penalty where others clip.

    Args and Returns: as `clip`; nothing is clipped, and the log-ratio not clamped.
    Source: Richemond et al. 2024 (Offline Regularised RL for LLM Alignment); verl's compute_policy_loss_dro.
    """
    loss = 0.5 * config.dro_beta * tokens.log_ratios.square() - tokens.log_probs * tokens.advantages
    return tokens.result(tokens.weighted(loss), config, ratios=tokens.ratios())


def _log_probs(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """New and old ones without gradient, float64, as 1 - p of a sure token has few digits; at most 0."""
    new = tokens.log_probs.detach().double()
    return new.clamp(max=0.0), (new - tokens.log_ratios.detach().double()).clamp(max=0.0)


def _trusted(tokens: Tokens, config: PolicyConfig, kept: torch.Tensor) -> Result:
    ratios = tokens.ratios().detach()
    bounded = ratios if config.clip_ratio_c is None else ratios.clamp(max=config.clip_ratio_c)
    loss = torch.where(kept, -tokens.advantages * bounded * tokens.log_probs, 0.0)
    return tokens.result(
        tokens.weighted(loss), config, ratios=ratios, clipped=~kept, held=kept & (ratios > bounded) & tokens.mask
    )
