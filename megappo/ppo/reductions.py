"""Operations on padded responses that several modules share: checks, sums over ranks, groups of responses."""

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.moments import Moments, merged_moments, moments

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
        found = f": {values[broken[:10]].tolist()}" if valid is None else " on tokens with response_mask 1"
        raise FloatingPointError(f"{name} of responses {broken[:10].tolist()} are not finite{found}")


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
