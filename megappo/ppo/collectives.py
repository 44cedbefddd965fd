"""Sums over the ranks of a process group; without a group, of this rank alone."""

import torch
import torch.distributed as dist


def sum_over_ranks(sums: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The elementwise sum of all ranks' `sums`, a new tensor; every rank of the group calls. None = `sums` itself."""
    if group is None:
        return sums
    total = sums.clone()
    dist.all_reduce(total, group=group)
    return total
