"""Aggregation of token losses to the mini-batch's mean, the same however the mini-batch is cut."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megappo.ppo.conventions import Conventions

Unreduced = dict[str, tuple[Tensor, str]]
"""Metric -> any number of values and a name of `observe.metrics.REDUCTIONS`: max, mean, ..."""
Metrics = dict[str, Tensor | tuple[Tensor, str]]
"""A loss's metrics: `Unreduced` values, or partial sums, 0-dim float32, detached."""

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Normaliser:
    """Counts that a mini-batch's losses are divided by, over all its data-parallel ranks and micro-batches.

    Attributes:
        num_tokens: tokens with mask 1.
        num_sequences: rows with at least one such token; with `Conventions.counts_empty_rows` all rows.
        max_length: the constant of seq-mean-token-sum-norm: rollout.max_response_length.
    """

    num_tokens: int
    num_sequences: int
    max_length: int

    @classmethod
    def of(cls, mask: Tensor) -> "Normaliser":
        """Count a mini-batch that consists of this mask, [B, R]; max_length is R."""
        valid = mask.bool()
        return cls(int(valid.sum()), int(valid.any(dim=1).sum()), mask.shape[1])


def agg_mode(config: Any, conventions: Conventions, method_mode: str | None = None) -> str:
    """Return the aggregation of a config section (actor, critic), else the method's own, else the conventions'."""
    return config.loss_agg_mode or method_mode or conventions.loss_agg_mode


def aggregate(
    loss: Tensor,
    mask: Tensor,
    mode: str,
    *,
    normaliser: Normaliser | None = None,
    loss_weights: Tensor | None = None,
) -> Tensor:
    """Reduce token losses to this call's share of the mini-batch's loss.

    Args:
        loss, mask: [B, R], whole rows; losses where the mask is 0 are ignored, NaN too.
        mode: token-mean = sum over tokens / num_tokens; token-sum = sum over tokens, which grows with the batch;
            seq-mean-token-sum = mean over sequences of the sum of a sequence's tokens;
            seq-mean-token-mean = mean over sequences of the mean of its tokens;
            seq-mean-token-sum-norm = mean over sequences of (sum of its tokens / max_length), Dr. GRPO's.
        normaliser: of the mini-batch; None = counted from `mask`, with max_length R.
        loss_weights: [B], factors of each row's losses, which do not change the counts. None = 1.

    Returns:
        0-dim, of loss's dtype, summed in float64; 0 (still differentiable) where there is no token at all.

    Raises:
        ValueError: unknown mode.
    Source: verl's agg_loss. Without counts it leaves out sequences without a token, as here; its runs pass the constant
        ppo_mini_batch_size x rollout.n, as the presets verl, slime and miles do (`Conventions.counts_empty_rows`). The
        constant of seq-mean-token-sum-norm is actor.loss_scale_factor, by default the padded width, which changes from
        batch to batch; verl before 2026-02-26 did not divide that mode by the number of sequences.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown loss_agg_mode {mode!r}: choose one of {', '.join(AGGREGATIONS)}")
    normaliser = Normaliser.of(mask) if normaliser is None else normaliser
    valid = mask.bool()
    sums = torch.where(valid, loss, 0.0).sum(dim=1, dtype=torch.float64)
    if mode == "seq-mean-token-mean":
        sums = sums / valid.sum(dim=1).clamp(min=1)
    if loss_weights is not None:
        sums = sums * loss_weights
    divisor = {"token-mean": normaliser.num_tokens, "token-sum": 1}.get(mode, normaliser.num_sequences)
    divisor *= normaliser.max_length if mode == "seq-mean-token-sum-norm" else 1
    return (sums.sum() / max(divisor, 1)).to(loss.dtype)


def token_mean(x: Tensor, mask: Tensor, normaliser: Normaliser | None) -> Tensor:
    """Return the mean of x over the mini-batch's tokens (of flags: their fraction), detached float32."""
    return aggregate(x.detach().float(), mask, "token-mean", normaliser=normaliser)
