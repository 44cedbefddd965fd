"""Sums and maxima over the ranks of a process group; without a group, of this rank alone."""

import torch
import torch.distributed as dist


def sum_over_ranks(sums: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The elementwise sum of all ranks' `sums`, a new tensor; every rank of the group calls. None = `sums` itself."""
    if group is None:
        return sums
    total = sums.clone()
    dist.all_reduce(total, group=group)
    return total


def max_over_ranks(maxima: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The elementwise maximum; otherwise as `sum_over_ranks`. A rank without values gives -inf."""
    if group is None:
        return maxima
    largest = maxima.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest
