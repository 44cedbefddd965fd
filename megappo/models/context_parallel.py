"""Exchanges of context-parallel ranks: keys and values for attention, and the outputs of the heads."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megappo.batch.packing import held_positions


def whole_pack(share: torch.Tensor, cu_seqlens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every token's values, in the pack's order; each rank's gradient for them goes back to who holds the token.

    Args:
        share: [T / size, ...], of the tokens that this rank holds.
        cu_seqlens: [sequences + 1] boundaries of the whole sequences.
        group: ranks that hold the shares; every one of them calls, in the backward pass too.
    Returns:
        [T, ...].
    """
    if group.size() == 1:
        return share
    gathered = gather_from_sequence_parallel_region(share, group=group)
    held = torch.cat([held_positions(cu_seqlens, group.size(), rank) for rank in range(group.size())])
    return gathered.index_select(0, held.argsort())


def sum_of_shares(share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the ranks, each of which has its share and 0 elsewhere; every rank then computes the same loss from it.

    So the gradient is passed on as it is: this rank's own share of it counts.
    """
    return _SumOfShares.apply(share, group) if group.size() > 1 else share


class _SumOfShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        whole = share.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
