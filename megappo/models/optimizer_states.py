"""A distributed optimizer's states as dist_checkpointing takes them: each parameter's as one, on one of its ranks."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megappo import platform

STATES = ("param", "exp_avg", "exp_avg_sq")

Sharded = ShardedTensor | ShardedTensorFactory


def sharded_states(
    optimizer: DistributedOptimizer, model: dict[str, Any], is_loading: bool, metadata: dict[str, Any]
) -> dict[int, dict[str, Sharded]]:
    """In place of `DistributedOptimizer.sharded_param_state_fully_reshardable`, in its format.

    That one gathers all states in the memory of the group's first rank, several times over, and has it write them
    alone. Here the states of a parameter go to the rank that holds its beginning: most lie there whole, so next to
    nothing is sent, and all ranks write. All ranks of the optimizer's group together.
    """
    if is_loading:
        return DistributedOptimizer.sharded_param_state_fully_reshardable(optimizer, model, is_loading, metadata)
    leaves = {leaf.data: leaf for leaf in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    numbers, states = count(), {}
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:
            number, pieces = next(numbers), list(_pieces(buffer, parameter, optimizer.data_parallel_group))
            found = _whole(optimizer, parameter, pieces)
            if found is not None:
                states[number] = {name: _leaf(leaves[parameter], name, found[i]) for i, name in enumerate(STATES)}
    return states


def _pieces(
    buffer: _ParamAndGradBuffer, parameter: torch.nn.Parameter, group: dist.ProcessGroup
) -> Iterator[tuple[int, int]]:
    """(rank in the group, numbers there) of each piece of a parameter, which is cut where its bucket is."""
    start, end, number = buffer.param_index_map[parameter]
    bucket = buffer.buckets[number]
    size = bucket.grad_data.numel() // group.size()
    for rank in range((start - bucket.offset) // size, (end - 1 - bucket.offset) // size + 1):
        first = bucket.offset + rank * size
        yield rank, min(end, first + size) - max(start, first)


def _whole(
    optimizer: DistributedOptimizer, parameter: torch.nn.Parameter, pieces: list[tuple[int, int]]
) -> list[torch.Tensor] | None:
    """A parameter's states where its first piece is; None elsewhere."""
    group, owner = optimizer.data_parallel_group, pieces[0][0]
    if group.rank() not in dict(pieces):
        return None
    held = optimizer._get_main_param_and_optimizer_states(parameter)
    mine = [held[name].detach() for name in STATES]
    if len(pieces) == 1:
        return mine
    # Groups of experts that are not shared out speak NCCL alone.
    device = "cpu" if "gloo" in dist.get_backend_config(group) else platform.device()
    here = torch.stack(mine).float().to(device)
    if group.rank() != owner:
        dist.send(here, group=group, group_dst=owner)
        return None
    parts = [here]
    for rank, size in pieces[1:]:
        parts.append(torch.empty(len(STATES), size, device=device))
        dist.recv(parts[-1], group=group, group_src=rank)
    return [torch.cat([part[i] for part in parts]) for i in range(len(STATES))]


def _leaf(of_parameter: Sharded, name: str, state: torch.Tensor) -> Sharded:
    """What a parameter's state is called and how it is cut: as the parameter, but for the one rank that has it."""
    changes = {
        "key": f"optimizer.state.{name}.{of_parameter.key}",
        "data": state.reshape(of_parameter.data.shape),
        "replica_id": (*of_parameter.replica_id[:-1], 0),
    }
    if isinstance(of_parameter, ShardedTensor):
        changes["dtype"] = state.dtype
    return replace(of_parameter, **changes)
