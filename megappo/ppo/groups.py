"""Responses to the same prompt, compared with each other. All float64."""

import torch

EPS = 1e-6
"""Added to standard deviations of scores."""


class Groups:
    """Which responses answer the same prompt; there are at least two to each.

    Args:
        ids: [B]: those with the same number, in any order.
    Attributes:
        rows: [B] int64, the group of each response.
        counts: [groups] int64, the responses in each.
    Raises:
        ValueError: a group of one.
    """

    def __init__(self, ids: torch.Tensor):
        names, self.rows, self.counts = ids.unique(return_inverse=True, return_counts=True)
        single = names[self.counts == 1].tolist()
        if single:
            raise ValueError(
                f"groups {single[:10]} have one response only, and nothing to compare it with: sample at least two per "
                "prompt (rollout.n >= 2)"
            )

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """[groups, ...], from [B, ...]."""
        return x.new_zeros(len(self.counts), *x.shape[1:]).index_add_(0, self.rows, x)

    def centred(self, scores: torch.Tensor) -> torch.Tensor:
        """[B]: each score minus its group's mean."""
        return scores - (self.sums(scores) / self.counts)[self.rows]

    def stds(self, scores: torch.Tensor) -> torch.Tensor:
        """[groups], with ddof 1, plus EPS, as they divide by it."""
        return (self.sums(self.centred(scores).square()) / (self.counts - 1)).sqrt() + EPS

    def normalized(self, scores: torch.Tensor) -> torch.Tensor:
        """[B]: centred, over the group's standard deviation."""
        return self.centred(scores) / self.stds(scores)[self.rows]
