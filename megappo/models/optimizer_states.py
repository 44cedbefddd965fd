"""A distributed optimizer's states as dist_checkpointing takes them: saved by parameter, loaded by piece of a rank."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from math import prod
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megappo.runtime import platform

STATES = ("param", "exp_avg", "exp_avg_sq")

Sharded = ShardedTensor | ShardedTensorFactory
Shape = tuple[int, ...]


def sharded_states(
    optimizer: DistributedOptimizer, model: dict[str, Any], is_loading: bool, metadata: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """In place of `DistributedOptimizer.sharded_param_state_fully_reshardable`, in its format.

    That one gathers all states in the memory of the group's first rank, several times over, and has it write them
    alone, and every rank load all of them. Here the states of a parameter go to the rank that holds its beginning: most
    lie there whole, so next to nothing is sent, and all ranks write. A load reads each rank's own pieces into its
    states, in place. All ranks of the optimizer's group together.
    """
    leaves = {leaf.data: leaf for leaf in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    if is_loading:
        pieces = enumerate(optimizer.model_param_gbuf_map)
        return {number: _boxes(optimizer, parameter, leaves[parameter]) for number, parameter in pieces}
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


def _boxes(
    optimizer: DistributedOptimizer, parameter: torch.nn.Parameter, of_parameter: Sharded
) -> dict[str, list[ShardedTensor]]:
    """Name of a state -> boxes of the checkpoint's tensors that make up this rank's piece of it, loaded in place.

    A piece is a range of a parameter's numbers. Boxes cover it exactly, so that no number is read twice and none needs
    room besides the state itself.
    """
    held = optimizer._get_main_param_and_optimizer_states(parameter)
    start = optimizer._get_model_param_range_map(parameter)["param"].start
    return {name: list(_boxes_of(_on_meta(of_parameter, name), held[name].detach(), start)) for name in STATES}


def _on_meta(of_parameter: Sharded, name: str) -> list[ShardedTensor]:
    """A parameter's state as it is stored, without memory. A factory cuts it into views, such as gate and up of an MLP,
    which are stored as tensors of their own."""
    whole = _leaf(of_parameter, name, torch.empty(of_parameter.data.shape, device="meta"))
    return whole.build() if isinstance(whole, ShardedTensorFactory) else [whole]


def _boxes_of(stored: list[ShardedTensor], piece: torch.Tensor, start: int) -> Iterator[ShardedTensor]:
    """As `_boxes`, of one state, of which `piece` holds the numbers from `start` on."""
    for part in nested_values(stored):
        if not part.data.is_contiguous():
            raise NotImplementedError(f"{part.key} is stored in another order of its numbers than the parameter's")
        first = part.data.storage_offset()
        begin, end = max(start, first), min(start + piece.numel(), first + part.data.numel())
        shape = (1,) * part.prepend_axis_num + part.local_shape
        for offsets, sizes in boxes(shape, begin - first, end - first):
            data = piece[begin - start :][: prod(sizes)].view(sizes)
            begin += data.numel()
            yield replace(
                part,
                data=data,
                local_shape=sizes,
                global_offset=tuple(map(add, part.global_offset, offsets)),
                axis_fragmentations=None,  # boxes make up no regular grid
                prepend_axis_num=0,
            )


def boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Offsets and sizes of boxes that cover the numbers `start` to `stop` of a tensor, in their order."""
    if not shape and start < stop:
        yield (), ()
    row = prod(shape[1:])
    while shape and start < stop:
        number, within = divmod(start, row)
        num_rows = 0 if within else (stop - start) // row
        if num_rows:
            yield (number, *[0] * len(shape[1:])), (num_rows, *shape[1:])
            start += num_rows * row
        else:
            end = min(stop - number * row, row)
            yield from (((number, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], within, end))
            start = number * row + end
