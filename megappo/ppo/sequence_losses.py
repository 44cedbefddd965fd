"""Policy losses whose ratio belongs to a sequence: GSPO and GMPO. All tensors [B, R] float32."""

import torch

from megappo.ppo.surrogate import PolicyConfig, Result, Tokens, clip_range, clipped_surrogate


def gspo(tokens: Tokens, config: PolicyConfig) -> Result:
    """GSPO: PPO's clip of the sequence's ratio, the geometric mean of its tokens' ratios.

    In the token form, ratio_t = sg(s) x p_t / sg(p_t): each token has the sequence's value and its own gradient, so
    that advantages may differ between tokens.

    Args and Returns: as `clip`; clip_ratio_c is not read (no dual clip). The log of the sequence's ratio is what
    log_ratio_clamp bounds (verl: at most 10; OpenRLHF: not at all). A new log_prob of -inf makes the loss NaN, as in
    verl, and a run skips the optimizer step; the sequence's ratio is 0 in slime, OpenRLHF and NeMo-RL, and 1 in miles.
    The metric ratio is the mean over tokens of their sequence's. A loss_agg_mode of null is seq-mean-token-mean, the
    paper's; verl takes that always, here a mode that is set holds.
    Source: Zheng et al. 2025 (GSPO), eqs. 5, 7 and 14; verl's compute_policy_loss_gspo.
    """
    own = tokens.log_probs - tokens.log_probs.detach()
    ratios = tokens.clamp(own + tokens.sequence_mean(tokens.log_ratios).detach()).exp()
    loss, clipped = clipped_surrogate(tokens.advantages, ratios, config)
    return tokens.result(tokens.weighted(loss), config, ratios=ratios, clipped=clipped)


def gmpo(tokens: Tokens, config: PolicyConfig) -> Result:
    """GMPO: -A x the geometric mean of a sequence's ratios, each clipped on its own.

    A token's log-ratio is clipped to [-clip_ratio_low, clip_ratio_high] where that makes the objective smaller; A is
    the mean of the sequence's advantages.

    Args and Returns: as `clip`; clip_ratio_c is not read. The loss of a sequence stands at each of its tokens:
    loss_agg_mode seq-mean-token-mean is the paper's mean over sequences, verl's only one, and what null means.
    Of rollout_is_weights the geometric mean per sequence is taken, as in verl, with a weight of 0 counting as 1e-10.
    A weight of 0, of a rejected token or by OPSM, so scales its sequence by 1e-10 ** (1 / tokens): one of 100 leaves
    0.79 of the loss. In verl a rejected token leaves the mask, and with it the mean: 1.0 is left.
    log_ratio_clamp bounds the log of the sequence's ratio (verl: nothing does). pg_clipfrac counts the tokens whose
    log-ratio was clipped (verl: those of positive advantages; pg_clipfrac_lower has those of negative ones); ratio is
    the mean over tokens of their sequence's.
    Source: Zhao et al. 2025 (Geometric-Mean Policy Optimization); verl's compute_policy_loss_geo_mean.
    """
    log_ratios, clipped = _clipped_log_ratios(tokens, config)
    ratios = tokens.clamp(tokens.sequence_mean(log_ratios)).exp().expand_as(log_ratios)
    loss = -tokens.sequence_mean(tokens.advantages) * ratios
    if tokens.weights is not None:
        loss = loss * tokens.sequence_mean(tokens.weights.clamp(min=1e-10).log()).exp()
    return tokens.result(loss, config, ratios=ratios, clipped=clipped)


def _clipped_log_ratios(tokens: Tokens, config: PolicyConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-ratios, clipped on the side that the advantage's sign says, and where."""
    low, high = clip_range(config)
    sign = tokens.advantages.sign()
    unclipped = sign * tokens.log_ratios
    clipped = sign * tokens.log_ratios.clamp(-low, high)
    return sign * torch.minimum(unclipped, clipped), clipped < unclipped
