"""Sums, moments and parts over the ranks of a process group; without a group, of this rank alone."""

import torch
import torch.distributed as dist


def sum_over_ranks(sums: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The elementwise sum of all ranks' `sums`, a new tensor; every rank of the group calls. None = `sums` itself."""
    if group is None:
        return sums
    total = sums.clone()
    dist.all_reduce(total, group=group)
    return total


def moments_over_ranks(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """How many values there are on all ranks, their mean, and the sum of squared deviations from it: [3].

    Args:
        values: [n] float64; n may differ between ranks, and be 0. Every rank of the group calls.
    """
    count = len(values)
    mean = values.sum() / max(count, 1)
    part = torch.stack([mean.new_tensor(count), mean, (values - mean).square().sum()])
    return part if group is None else merged_moments(_of_ranks(part, group))


def merged_moments(parts: torch.Tensor) -> torch.Tensor:
    """Of several sets of numbers together, [3]: how many, their mean, the sum of their squared deviations from it.

    Args:
        parts: [sets, 3] float64, the same of each set.
    Source: Chan, Golub & LeVeque 1983, Algorithms for Computing the Sample Variance, equation 1.5.
    """
    counts, means, squares = parts.unbind(1)
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return torch.stack([count, mean, (squares + counts * (means - mean).square()).sum()])


def _of_ranks(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's `part`, [ranks, *part.shape]; every rank of the group calls."""
    parts = part.new_empty(group.size(), *part.shape)
    dist.all_gather([*parts], part, group=group)
    return parts
