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


def of_ranks(part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Every rank's `part`, [ranks, *part.shape]; every rank of the group calls. None = this one's."""
    if group is None:
        return part[None]
    parts = part.new_empty(group.size(), *part.shape)
    dist.all_gather([*parts], part, group=group)
    return parts


def moments_over_ranks(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """How many values there are on all ranks, their means, and the sums of squared deviations from these: [3, k].

    Args:
        values: [k, n] float64; n may differ between ranks, and be 0. Every rank of the group calls.
    """
    count = values.shape[1]
    means = values.sum(dim=1) / max(count, 1)
    squares = (values - means[:, None]).square().sum(dim=1)
    return merged_moments(of_ranks(torch.stack([torch.full_like(means, count), means, squares]), group))


def merged_moments(parts: torch.Tensor) -> torch.Tensor:
    """Of several sets of numbers together, [3, ...]: how many, their mean, the sum of their squared deviations from it.

    Args:
        parts: [sets, 3, ...] float64, the same of each set.
    Source: Chan, Golub & LeVeque 1983, Algorithms for Computing the Sample Variance, equation 1.5.
    """
    counts, means, squares = parts.unbind(1)
    count = counts.sum(dim=0)
    mean = (counts * means).sum(dim=0) / count.clamp(min=1)
    return torch.stack([count, mean, (squares + counts * (means - mean).square()).sum(dim=0)])
