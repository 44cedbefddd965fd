"""Sums, moments and parts over the ranks of a process group; without a group, of this rank alone."""

import torch
import torch.distributed as dist

from megappo.moments import Moments, merged_moments, moments


def sum_over_ranks(sums: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The elementwise sum of all ranks' `sums`, a new tensor; every rank of the group calls. None = `sums` itself."""
    if group is None:
        return sums
    total = sums.clone()
    dist.all_reduce(total, group=group)
    return total


def moments_over_ranks(values: torch.Tensor, group: dist.ProcessGroup | None) -> Moments:
    """Of the values of all ranks.

    Args:
        values: [n] float64; n may differ between ranks, and be 0. Every rank of the group calls.
    """
    part = moments(values)
    return merged_moments((part[None] if group is None else _of_ranks(part, group)).tolist())


def _of_ranks(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's `part`, [ranks, *part.shape]; every rank of the group calls."""
    parts = part.new_empty(group.size(), *part.shape)
    dist.all_gather([*parts], part, group=group)
    return parts
