"""Operations on padded responses that several modules share: checks, sums over ranks, groups of responses, and the
aggregation of token losses to the mini-batch's mean, the same however the mini-batch is cut."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.moments import Moments, merged_moments, moments
from megappo.ppo.conventions import Conventions

Unreduced = dict[str, tuple[Tensor, str]]
"""Metric -> any number of values and a name of `observe.metrics.REDUCTIONS`: max, mean, ..."""
Metrics = dict[str, Tensor | tuple[Tensor, str]]
"""A loss's metrics: `Unreduced` values, or partial sums, 0-dim float32, detached."""

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
EPS = 1e-6
"""Added to standard deviations of scores."""


def check_finite(name: str, values: Tensor, valid: Tensor | None = None) -> None:
    """Check that all values [B], or those [B, R] at tokens with mask 1, are finite.

    Raises:
        FloatingPointError: names the first responses with a value that is not.
    """
    is_broken = ~values.isfinite() if valid is None else (valid & ~values.isfinite()).any(dim=1)
    broken = is_broken.nonzero().flatten()
    if len(broken):
        raise FloatingPointError(f"{name} of responses {broken[:10].tolist()} are not finite")


def check_has_tokens(response_mask: Tensor) -> None:
    """Check that each response has a token with mask 1, which its score can be put on.

    Raises:
        ValueError: names the first responses without.
    """
    empty = (~response_mask.bool().any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"responses {empty[:10]} have no token with response_mask 1, so their score has no place")


def add_to_last_token(x: Tensor, valid: Tensor, amounts: Tensor) -> Tensor:
    """Add amounts [B] to x [B, R] at each row's last token with mask 1; a row without one stays as it is."""
    is_last = valid & (valid.cumsum(dim=1) == valid.sum(dim=1, keepdim=True))
    return x + torch.where(is_last, amounts.float()[:, None], 0.0)


def gather_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return every rank's x, [ranks, *x.shape]; every rank of the group calls. None = this rank alone."""
    if group is None:
        return x[None]
    parts = x.new_empty(group.size(), *x.shape)
    dist.all_gather([*parts], x, group=group)
    return parts


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the elementwise sum of all ranks' x, a new tensor; every rank of the group calls. None = x itself."""
    if group is None:
        return x
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def moments_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Moments:
    """Return the moments of all ranks' values, [n] float64; n may differ between ranks and be 0."""
    return merged_moments(gather_over_ranks(moments(values), group).tolist())


class PromptGroups:
    """The responses of a batch, grouped by their prompt: at least two each. All float64.

    Args:
        ids: [B]; responses with the same number, in any order, answer the same prompt.
    Attributes:
        rows: [B] int64, the group of each response.
        counts: [groups] int64, the responses in each.
    Raises:
        ValueError: a group of one.
    """

    def __init__(self, ids: Tensor):
        names, self.rows, self.counts = ids.unique(return_inverse=True, return_counts=True)
        single = names[self.counts == 1].tolist()
        if single:
            raise ValueError(
                f"groups {single[:10]} have one response only, and nothing to compare it with: sample at least two per "
                "prompt (rollout.n >= 2)"
            )

    def sums(self, x: Tensor) -> Tensor:
        """Sum [B, ...] over each group: [groups, ...]."""
        return x.new_zeros(len(self.counts), *x.shape[1:]).index_add_(0, self.rows, x)

    def centered(self, scores: Tensor) -> Tensor:
        """Subtract each group's mean from its scores, [B]."""
        return scores - (self.sums(scores) / self.counts)[self.rows]

    def stds(self, scores: Tensor) -> Tensor:
        """Return each group's standard deviation with ddof 1, plus EPS, as scores are divided by it: [groups]."""
        return (self.sums(self.centered(scores).square()) / (self.counts - 1)).sqrt() + EPS

    def normalized(self, scores: Tensor) -> Tensor:
        """Subtract each group's mean from its scores and divide by its standard deviation, [B]."""
        return self.centered(scores) / self.stds(scores)[self.rows]


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
        normaliser: normaliser of the mini-batch; None = counted from `mask`, with max_length R.
        loss_weights: [B], factors of each row's losses, which do not change the counts. None = 1.

    Returns:
        0-dim, of loss's dtype, summed in float64; 0 (still differentiable) where there is no token at all.

    Raises:
        ValueError: unknown mode.
    Source: verl's agg_loss. Without counts it leaves out sequences without a token, as here; its runs pass the constant
        ppo_mini_batch_size x rollout.n, as the presets verl, slime and miles do (`Conventions.counts_empty_rows`).
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
