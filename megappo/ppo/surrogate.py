"""What the policy losses share: cleaned inputs, ratios, PPO's clip, and the way from token losses to a result."""

import math
from functools import cached_property
from typing import Any

import torch

from megappo.ppo.aggregation import Metrics, Normaliser, agg_mode, aggregate, token_mean
from megappo.ppo.conventions import DEFAULT, Conventions

Result = tuple[torch.Tensor, Metrics]
"""(loss, metrics), this call's share of the mini-batch's."""


PolicyConfig = Any
"""The actor section, or whatever has the keys that the loss declares in the table of methods, loss_agg_mode, and as
`method` its entry there."""


class Tokens:
    """The inputs of a policy loss, [B, R], 0 wherever the mask is 0.

    Args:
        log_probs: of the policy being trained; the only one that gets a gradient.
        old_log_probs: of the policy before the update.
        advantages, response_mask: float32.
        rollout_is_weights: importance weights, detached and multiplied in after clipping; None = 1.
        selected: bool, the tokens that a method treats apart; None = none.
        normaliser: of the mini-batch; None = counted from response_mask.
        conventions: their log_ratio_clamp bounds the log-ratio before exp.
        opsm_delta: off-policy sequence masking, `_off_policy`; None = off.
        loss_weights: see `aggregate`.

    They are cleaned before anything is computed from them: a NaN behind the mask would otherwise come back in the
    gradient, as 0 x NaN, however well the loss itself is masked.
    """

    def __init__(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        rollout_is_weights: torch.Tensor | None = None,
        selected: torch.Tensor | None = None,
        normaliser: Normaliser | None = None,
        conventions: Conventions = DEFAULT,
        opsm_delta: float | None = None,
        loss_weights: torch.Tensor | None = None,
    ):
        self.mask = response_mask.bool()
        self.log_probs = torch.where(self.mask, log_probs, 0.0)
        self.advantages = torch.where(self.mask, advantages.detach(), 0.0)
        self.log_ratios = self.log_probs - torch.where(self.mask, old_log_probs.detach(), 0.0)
        self.weights = None if rollout_is_weights is None else torch.where(self.mask, rollout_is_weights.detach(), 0.0)
        self.selected = torch.zeros_like(self.mask) if selected is None else selected
        self.normaliser = normaliser
        self.conventions = conventions
        self.loss_weights = loss_weights
        self.masked = None if opsm_delta is None else self._off_policy(opsm_delta)
        if self.masked is not None:
            self.weights = torch.where(self.masked, 0.0, 1.0 if self.weights is None else self.weights)

    def _off_policy(self, delta: float) -> torch.Tensor:
        """[B, R] bool: tokens with A < 0 of rows whose mean of old_log_probs - log_probs is above delta.

        Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 3.1, off-policy sequence masking; there old_log_probs are the
        engine's. slime's compute_opsm_mask.
        """
        return (self.advantages < 0) & (self.sequence_mean(-self.log_ratios.detach()) > delta)

    def clamp(self, log_ratios: torch.Tensor) -> torch.Tensor:
        """Log-ratios as they may go into exp."""
        limit = self.conventions.log_ratio_bound
        return log_ratios.clamp(-limit, limit)

    def ratios(self) -> torch.Tensor:
        """exp of each token's clamped log-ratio."""
        return self.clamp(self.log_ratios).exp()

    @cached_property
    def policy_kl(self) -> torch.Tensor:
        """The mean of old_log_probs - log_probs (clamped as in the ratio), an estimate of the KL between the two."""
        return token_mean(-self.clamp(self.log_ratios), self.mask, self.normaliser)

    def sequence_mean(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 1]: the mean over each row's tokens; 0 where it has none."""
        total = torch.where(self.mask, x, 0.0).sum(dim=1, keepdim=True, dtype=torch.float64)
        return (total / self.mask.sum(dim=1, keepdim=True).clamp(min=1)).to(x.dtype)

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        """Token losses x rollout_is_weights."""
        return loss if self.weights is None else loss * self.weights

    def result(
        self,
        loss: torch.Tensor,
        config: PolicyConfig,
        *,
        ratios: torch.Tensor,
        clipped: torch.Tensor | None = None,
        held: torch.Tensor | None = None,
    ) -> Result:
        """Aggregate token losses, and the metrics every policy loss has.

        Args:
            loss, ratios: [B, R].
            config: its loss_agg_mode holds, else the method's own, else the conventions'.
            clipped, held: [B, R] bool, tokens for pg_clipfrac and pg_clipfrac_lower; None = none.
        """
        mode = agg_mode(config, self.conventions, config.method.loss_agg_mode)
        none = torch.zeros_like(self.mask)
        shown = {
            "pg_clipfrac": none if clipped is None else clipped,
            "pg_clipfrac_lower": none if held is None else held,
            "ratio": ratios,
        }
        metrics: Metrics = {name: token_mean(x, self.mask, self.normaliser) for name, x in shown.items()}
        if self.masked is not None:
            metrics["opsm_frac"] = token_mean(self.masked, self.mask, self.normaliser)
        shown_ratios = ratios.detach().masked_fill(~self.mask, -math.inf)
        metrics |= {"ppo_kl": self.policy_kl, "ratio_max": (shown_ratios, "max")}
        total = aggregate(loss, self.mask, mode, normaliser=self.normaliser, loss_weights=self.loss_weights)
        return total, metrics


def clip_range(config: PolicyConfig) -> tuple[float, float]:
    """The lower and the upper epsilon."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def clipped_surrogate(
    advantages: torch.Tensor, ratios: torch.Tensor, config: PolicyConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's max(-A r, -A clip(r)) at each token, and where the clipped side is the larger."""
    low, high = clip_range(config)
    unclipped = -advantages * ratios
    clipped = -advantages * ratios.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped
