"""Policy losses. All tensors [B, R] float32 over padded responses; mask 1 on tokens the policy wrote.

Each loss takes (`PolicyInputs`, the actor section of the config) and returns (loss, metrics), both divided by counts of
the whole mini-batch (`Normaliser`); `megappo.config.methods.POLICY_LOSSES` registers it. Ratios belong to a token
(clip, cispo, sapo, gpg, dis), to a sequence (gspo, gmpo), or give way to a divergence (dppo_tv, dppo_kl, dro).
`covariance` has the losses that treat some tokens separately.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megappo.ppo.conventions import DEFAULT, Conventions
from megappo.ppo.reductions import Metrics, Normaliser, agg_mode, aggregate, token_mean

Result = tuple[Tensor, Metrics]
"""(loss, metrics), this call's share of the mini-batch's."""
PolicyConfig = Any
"""The actor section, or an object with the keys that the loss declares in the table of methods, loss_agg_mode, and as
`method` its entry there."""


class PolicyInputs:
    """Inputs of a policy loss, [B, R], set to 0 wherever the mask is 0.

    Args:
        log_probs: log-probs of the policy being trained; the only input that gets a gradient.
        old_log_probs: log-probs of the policy before the update.
        advantages, response_mask: float32.
        rollout_is_weights: importance weights, detached and multiplied in after clipping; None = 1.
        selected: bool, the tokens that a method treats separately; None = none.
        normaliser: normaliser of the mini-batch; None = counted from response_mask.
        conventions: log_ratio_clamp bounds the log-ratio before exp.
        opsm_delta: off-policy sequence masking: tokens with A < 0 have weight 0 in rows whose mean of old_log_probs -
            log_probs is above it; None = off.
        loss_weights: see `aggregate`.
        turns: the turn of each token with mask 1, from 1, ascending; None = a row is one turn.

    They are masked before anything is computed from them: a NaN behind the mask would otherwise come back in the
    gradient, as 0 x NaN, however well the loss itself is masked.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 3.1, off-policy sequence masking; there old_log_probs are the
        engine's. slime's compute_opsm_mask.
    """

    def __init__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        rollout_is_weights: Tensor | None = None,
        selected: Tensor | None = None,
        normaliser: Normaliser | None = None,
        conventions: Conventions = DEFAULT,
        opsm_delta: float | None = None,
        loss_weights: Tensor | None = None,
        turns: Tensor | None = None,
    ):
        self.mask = response_mask.bool()
        self.log_probs = torch.where(self.mask, log_probs, 0.0)
        self.advantages = torch.where(self.mask, advantages.detach(), 0.0)
        self.log_ratios = self.log_probs - torch.where(self.mask, old_log_probs.detach(), 0.0)
        self.weights = torch.ones_like(self.advantages)
        if rollout_is_weights is not None:
            self.weights = torch.where(self.mask, rollout_is_weights.detach(), 0.0)
        self.selected = torch.zeros_like(self.mask) if selected is None else selected
        self.normaliser = normaliser
        self.conventions = conventions
        self.loss_weights = loss_weights
        self.turns = turns
        self.off_policy = None
        if opsm_delta is not None:
            self.off_policy = (self.advantages < 0) & (self.sequence_mean(-self.log_ratios.detach()) > opsm_delta)
            self.weights = self.weights.masked_fill(self.off_policy, 0.0)

    def clamp(self, log_ratios: Tensor) -> Tensor:
        """Bound log-ratios before exp."""
        limit = self.conventions.log_ratio_bound
        return log_ratios.clamp(-limit, limit)

    def ratios(self) -> Tensor:
        """Return exp of each token's clamped log-ratio."""
        return self.clamp(self.log_ratios).exp()

    def token_mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over the mini-batch's tokens, detached; of flags their fraction."""
        return token_mean(x, self.mask, self.normaliser)

    def sequence_mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over each row's tokens, [B, 1]; 0 for a row without any."""
        total = torch.where(self.mask, x, 0.0).sum(dim=1, keepdim=True, dtype=torch.float64)
        return (total / self.mask.sum(dim=1, keepdim=True).clamp(min=1)).to(x.dtype)

    def turn_mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over the tokens of each token's turn in its row, [B, R]."""
        if self.turns is None:
            return self.sequence_mean(x)
        numbers = torch.where(self.mask, self.turns, 0.0)
        latest, _ = numbers.cummax(dim=1)
        begins = numbers > pad(latest[:, :-1], (1, 0))
        places = torch.where(self.mask, begins.cumsum(dim=1), 0)  # column 0 takes the other tokens
        zeros = x.new_zeros(len(x), x.shape[1] + 1, dtype=torch.float64)
        totals = zeros.scatter_add(1, places, torch.where(self.mask, x, 0.0).double())
        counts = zeros.scatter_add(1, places, self.mask.double())
        return (totals / counts.clamp(min=1)).gather(1, places).to(x.dtype)

    def weighted(self, loss: Tensor) -> Tensor:
        """Multiply token losses by rollout_is_weights."""
        return loss * self.weights

    def result(
        self,
        loss: Tensor,
        config: PolicyConfig,
        *,
        ratios: Tensor,
        clipped: Tensor | None = None,
        held: Tensor | None = None,
    ) -> Result:
        """Aggregate token losses and add the metrics that every policy loss has.

        Args:
            loss, ratios: [B, R].
            config: loss_agg_mode; null = the method's own, else the conventions'.
            clipped, held: [B, R] bool, tokens counted in pg_clipfrac and pg_clipfrac_lower; None = none.
        """
        none = torch.zeros_like(self.mask)
        metrics: Metrics = {
            "pg_clipfrac": self.token_mean(none if clipped is None else clipped),
            "pg_clipfrac_lower": self.token_mean(none if held is None else held),
            "ratio": self.token_mean(ratios),
            "ratio_max": (ratios.detach().masked_fill(~self.mask, -math.inf), "max"),
            "ppo_kl": self.token_mean(-self.clamp(self.log_ratios)),
        }
        if self.off_policy is not None:
            metrics["opsm_frac"] = self.token_mean(self.off_policy)
        mode = agg_mode(config, self.conventions, config.method.loss_agg_mode)
        total = aggregate(
            loss,
            self.mask,
            mode,
            normaliser=self.normaliser,
            loss_weights=self.loss_weights,
        )
        return total, metrics


def clip_range(config: PolicyConfig) -> tuple[float, float]:
    """Return the lower and the upper epsilon."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def clipped_surrogate(advantages: Tensor, ratios: Tensor, config: PolicyConfig) -> tuple[Tensor, Tensor]:
    """Return PPO's max(-A r, -A clip(r)) at each token, and the tokens where the clipped side is the larger."""
    low, high = clip_range(config)
    unclipped = -advantages * ratios
    clipped = -advantages * ratios.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def clip(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """PPO's clipped surrogate, with separate bounds (clip-higher) and, for negative advantages, the dual clip.

    Args:
        inputs: see `PolicyInputs`.
        config: the actor section. The ratio is clipped to [1 - clip_ratio_low, 1 + clip_ratio_high]; clip_ratio_c
            bounds the loss of a negative advantage A by -c * A, null = no bound.

    Returns:
        (loss, metrics): pg_clipfrac, the fraction of tokens with a clipped ratio; pg_clipfrac_lower, the fraction held
        by the dual clip; ppo_kl, the mean of old_log_probs - log_probs (clamped as in the ratio); ratio, its mean.
    Source: Schulman et al. 2017, eq. 7; Ye et al. 2020 (dual clip), eq. 5; Yu et al. 2025 (DAPO), section 3.1.
    """
    ratios = inputs.ratios()
    loss, clipped = clipped_surrogate(inputs.advantages, ratios, config)
    held = None
    if config.clip_ratio_c is not None:
        bound = -config.clip_ratio_c * inputs.advantages
        held = (inputs.advantages < 0) & (loss > bound)
        loss = torch.where(held, bound, loss)
    return inputs.result(
        inputs.weighted(loss),
        config,
        ratios=ratios,
        clipped=clipped,
        held=held,
    )


def cispo(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """CISPO: -clip(ratio), detached, x A x log_prob, so that a clipped token keeps a gradient.

    Args and Returns: as `clip`; clip_ratio_c is not read. pg_clipfrac counts ratios outside the clip range, for
    either sign of A.
    Source: MiniMax-M1 (2025), eqs. 4 and 5; the paper trains without the lower bound (clip_ratio_low >= 1 here).
    """
    low, high = clip_range(config)
    ratios = inputs.ratios().detach()
    kept = ratios.clamp(1.0 - low, 1.0 + high)
    loss = -kept * inputs.advantages * inputs.log_probs
    return inputs.result(inputs.weighted(loss), config, ratios=ratios, clipped=kept != ratios)


def sapo(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """SAPO: -A x 4 / tau x sigmoid(tau (ratio - 1)), a soft gate in the clip's place.

    Args and Returns: as `clip`; the clip bounds are not read and nothing counts as clipped. tau is tau_pos where
    A > 0, else tau_neg. A loss_agg_mode of null is seq-mean-token-mean, the paper's.
    Source: Gao et al. 2025 (Soft Adaptive Policy Optimization), eqs. 5 and 6.
    """
    ratios = inputs.ratios()
    taus = torch.where(inputs.advantages > 0, config.tau_pos, config.tau_neg)
    loss = -inputs.advantages * torch.sigmoid(taus * (ratios - 1.0)) * (4.0 / taus)
    return inputs.result(inputs.weighted(loss), config, ratios=ratios)


def gpg(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """GPG: -log_prob x A, the plain policy gradient.

    Args and Returns: as `clip`; old_log_probs only serve the metrics ppo_kl and ratio; nothing is clipped.
    Source: Chu et al. 2025 (Group Policy Gradient); verl's compute_policy_loss_gpg.
    """
    loss = -inputs.log_probs * inputs.advantages
    return inputs.result(inputs.weighted(loss), config, ratios=inputs.ratios())


def gspo(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """GSPO: PPO's clip of the sequence's ratio, the geometric mean of its tokens' ratios.

    In the token form, ratio_t = sg(s) x p_t / sg(p_t): each token has the sequence's value and its own gradient, so
    advantages may differ between tokens.

    Args and Returns: as `clip`; clip_ratio_c is not read (no dual clip). log_ratio_clamp bounds the log of the
    sequence's ratio. A new log_prob of -inf makes the loss NaN, and a run skips the optimizer step. The metric ratio is
    the mean over tokens of their sequence's ratio. A loss_agg_mode of null is seq-mean-token-mean, the paper's.
    Source: Zheng et al. 2025 (GSPO), eqs. 5, 7 and 14; verl's compute_policy_loss_gspo.
    """
    return _clip_means(inputs, inputs.sequence_mean(inputs.log_ratios), config)


def clip_turn(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """PPO's clip of the turn's ratio: GSPO's, with the turns of an episode in place of sequences.

    Args and Returns: as `gspo`; the metric ratio is the mean over tokens of their turn's ratio.
    Source: Li et al. 2025 (ST-PPO, arXiv 2511.20718), turn-level importance sampling, which they call Turn-PPO. The
        Turn-PPO of Li et al. 2025 (arXiv 2512.17008) also takes turns as actions: algorithm.gae_level=turn.
    """
    return _clip_means(inputs, inputs.turn_mean(inputs.log_ratios), config)


def gmpo(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """GMPO: -A x the geometric mean of a sequence's ratios, each clipped on its own.

    A token's log-ratio is clipped to [-clip_ratio_low, clip_ratio_high] where that makes the objective smaller; A is
    the mean of the sequence's advantages.

    Args and Returns: as `clip`; clip_ratio_c is not read. The loss of a sequence stands at each of its tokens, so
    loss_agg_mode seq-mean-token-mean, the meaning of null, is the paper's mean over sequences. A sequence is weighted
    by the geometric mean of its rollout_is_weights; a weight of 0 (a rejected token, OPSM) counts as 1e-10.
    log_ratio_clamp bounds the log of the sequence's ratio. pg_clipfrac counts the tokens whose log-ratio was clipped;
    ratio is the mean over tokens of their sequence's ratio.
    Source: Zhao et al. 2025 (Geometric-Mean Policy Optimization); verl's compute_policy_loss_geo_mean.
    """
    low, high = clip_range(config)
    sign = inputs.advantages.sign()
    unclipped = sign * inputs.log_ratios
    clipped = sign * inputs.log_ratios.clamp(-low, high)
    log_ratios = sign * torch.minimum(unclipped, clipped)
    ratios = inputs.clamp(inputs.sequence_mean(log_ratios)).exp().expand_as(log_ratios)
    weights = inputs.sequence_mean(inputs.weights.clamp(min=1e-10).log()).exp()
    loss = -inputs.sequence_mean(inputs.advantages) * ratios * weights
    return inputs.result(loss, config, ratios=ratios, clipped=clipped < unclipped)


def dppo_tv(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """DPPO with the binary total variation: leave out a token whose probability moved too far in A's direction.

    The loss is -min(ratio, clip_ratio_c), detached, x A x log_prob; 0 where A > 0 and p - p_old > clip_ratio_high, or
    A <= 0 and p_old - p > clip_ratio_low, with p and p_old the token's probabilities.

    Args and Returns: as `clip`; clip_ratio_c null = the ratio is not truncated; the paper advises a large one.
    pg_clipfrac is the fraction of tokens left out, pg_clipfrac_lower of tokens kept with a truncated ratio.
    Source: Qi et al. 2026 (Rethinking the Trust Region in LLM RL, arXiv 2602.04879), DPPO-Binary-TV; verl's
        compute_policy_loss_dppo_tv.
    """
    low, high = clip_range(config)
    new, old = _log_probs(inputs)
    moved = new.exp() - old.exp()
    return _dppo(inputs, config, torch.where(inputs.advantages > 0, moved <= high, moved >= -low))


def dppo_kl(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """DPPO with the binary KL: as `dppo_tv`, by the KL(old, new) of the two outcomes "this token" and "another".

    A token is left out where it is above clip_ratio_high (A > 0, p > p_old) or clip_ratio_low (A <= 0, p < p_old).

    Args and Returns: as `dppo_tv`.
    Source: as `dppo_tv`, DPPO-Binary-KL; verl's compute_policy_loss_dppo_kl with its 1e-8.
    """
    low, high = clip_range(config)
    new, old = _log_probs(inputs)
    p = new.exp()
    p_old = old.exp()
    kl = p_old * (old - new) + (1 - p_old) * torch.log((1 - p_old + 1e-8) / (1 - p + 1e-8))
    up = (kl <= high) | (p <= p_old)
    down = (kl <= low) | (p >= p_old)
    return _dppo(inputs, config, torch.where(inputs.advantages > 0, up, down))


def dro(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """DRO: -log_prob x A + dro_beta / 2 x log-ratio^2, a quadratic penalty where others clip.

    Args and Returns: as `clip`; nothing is clipped, and the log-ratio not clamped.
    Source: Richemond et al. 2024 (Offline Regularised RL for LLM Alignment); verl's compute_policy_loss_dro.
    """
    loss = 0.5 * config.dro_beta * inputs.log_ratios.square() - inputs.log_probs * inputs.advantages
    return inputs.result(inputs.weighted(loss), config, ratios=inputs.ratios())


def dis(inputs: PolicyInputs, config: PolicyConfig) -> Result:
    """SAO's double-sided importance sampling: REINFORCE weighted by the ratio to the policy that sampled.

    The loss is -ratio, detached, x A x log_prob where 1 - clip_ratio_low < ratio < 1 + clip_ratio_high, for either sign
    of A; 0 at the other tokens. old_log_probs are the engine's (algorithm.old_log_probs engine).

    Args and Returns: as `clip`; clip_ratio_c is not read. A ratio on a bound is left out, as in eq. 3. Tokens left out,
    whose fraction is pg_clipfrac, still count in the averaging.
    Source: Hou et al. 2026 (Single-Rollout Asynchronous Optimization, arXiv 2607.07508), section 3.1, eqs. 1 to 3; the
        same in GLM-5 (arXiv 2602.15763), eqs. 3 to 5.
    """
    low, high = clip_range(config)
    ratios = inputs.ratios().detach()
    kept = (ratios > 1.0 - low) & (ratios < 1.0 + high)
    loss = torch.where(kept, -ratios * inputs.advantages * inputs.log_probs, 0.0)
    return inputs.result(inputs.weighted(loss), config, ratios=ratios, clipped=~kept)


def _clip_means(inputs: PolicyInputs, means: Tensor, config: PolicyConfig) -> Result:
    """Compute PPO's clipped loss with exp(means) as the ratios, [B, R]; the gradient goes through each token's own
    log-prob."""
    own = inputs.log_probs - inputs.log_probs.detach()
    ratios = inputs.clamp(own + means.detach()).exp()
    loss, clipped = clipped_surrogate(inputs.advantages, ratios, config)
    return inputs.result(inputs.weighted(loss), config, ratios=ratios, clipped=clipped)


def _log_probs(inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
    """Return new and old log-probs without gradient, at most 0; float64, as 1 - p of a sure token has few digits."""
    new = inputs.log_probs.detach().double()
    return new.clamp(max=0.0), (new - inputs.log_ratios.detach().double()).clamp(max=0.0)


def _dppo(inputs: PolicyInputs, config: PolicyConfig, kept: Tensor) -> Result:
    """Take REINFORCE's loss with a truncated ratio at the tokens `kept`, 0 at the others."""
    ratios = inputs.ratios().detach()
    bounded = ratios if config.clip_ratio_c is None else ratios.clamp(max=config.clip_ratio_c)
    loss = torch.where(kept, -inputs.advantages * bounded * inputs.log_probs, 0.0)
    held = kept & (ratios > bounded) & inputs.mask
    return inputs.result(
        inputs.weighted(loss),
        config,
        ratios=ratios,
        clipped=~kept,
        held=held,
    )
