"""A model and its optimizer as dist_checkpointing takes them, whichever layout they are in.

The optimizer's states are saved by parameter, and each rank loads its own range of each.
"""

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
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megappo.models.gpt import ModelChunks
from megappo.placement.groups import ComponentGroups
from megappo.runtime import platform

STATES = ("param", "exp_avg", "exp_avg_sq")

Sharded = ShardedTensor | ShardedTensorFactory
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in a tensor."""


def sharding_metadata(groups: ComponentGroups) -> dict[str, Any]:
    """The `metadata` of `sharded_state_dict`, for checkpoints that load into any other layout."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": groups.collection.dp_cp,
    }


def sharded_chunks(chunks: ModelChunks, groups: ComponentGroups) -> dict[str, dict[str, Any]]:
    """The model as dist_checkpointing takes it, with layers numbered over the whole model.

    It is made of the unwrapped modules: the wrappers' own methods disagree about the prefix "module.". A model with
    adapters gives what is trained: the rest is in its folder.
    """
    metadata = sharding_metadata(groups)
    with groups.active():
        found = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    for state, chunk in zip(found.values(), chunks, strict=True):
        for name, parameter in chunk.named_parameters():
            if parameter.is_base:
                del state[name]
    return found


def sharded_optimizer(
    optimizer: ChainedOptimizer, model: dict[str, dict[str, Any]], groups: ComponentGroups, is_loading: bool
) -> dict[str, Any]:
    """The optimizer of `sharded_chunks` as dist_checkpointing takes it. The component's groups are active."""
    state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=sharding_metadata(groups))
    for part in [state] if len(optimizer.chained_optimizers) == 1 else state.values():
        if not part.get("param_state", True):  # all on other ranks, or of no parameters: Megatron would warn
            del part["param_state"]
    return state


def sharded_states(
    optimizer: DistributedOptimizer, model: dict[str, Any], is_loading: bool, metadata: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """Stand in for `DistributedOptimizer.sharded_param_state_fully_reshardable`, in its format.

    The states of a parameter go to the rank that holds its beginning: most lie there whole, so little is sent, and all
    ranks write. A load reads each rank's own ranges into its states, in place. All ranks of the optimizer's group call
    together.
    """
    leaves = {leaf.data: leaf for leaf in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    if is_loading:
        parameters = enumerate(optimizer.model_param_gbuf_map)
        return {number: _own_ranges(optimizer, parameter, leaves[parameter]) for number, parameter in parameters}
    numbers, states = count(), {}
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:
            number = next(numbers)
            found = _whole_states(optimizer, buffer, parameter)
            if found is not None:
                states[number] = {name: _leaf(leaves[parameter], name, found[i]) for i, name in enumerate(STATES)}
    return states


def _holders(
    buffer: _ParamAndGradBuffer, parameter: torch.nn.Parameter, group: dist.ProcessGroup
) -> Iterator[tuple[int, int]]:
    """(rank in the group, numbers there) of each rank that holds a range of a parameter: its bucket is cut evenly."""
    start, end, number = buffer.param_index_map[parameter]
    bucket = buffer.buckets[number]
    size = bucket.grad_data.numel() // group.size()
    for rank in range((start - bucket.offset) // size, (end - 1 - bucket.offset) // size + 1):
        first = bucket.offset + rank * size
        yield rank, min(end, first + size) - max(start, first)


def _whole_states(
    optimizer: DistributedOptimizer, buffer: _ParamAndGradBuffer, parameter: torch.nn.Parameter
) -> list[torch.Tensor] | None:
    """A parameter's states, on the rank that holds its beginning; None elsewhere."""
    group = optimizer.data_parallel_group
    holders = list(_holders(buffer, parameter, group))
    owner = holders[0][0]
    if group.rank() not in dict(holders):
        return None
    held = optimizer._get_main_param_and_optimizer_states(parameter)
    mine = [held[name].detach() for name in STATES]
    if len(holders) == 1:
        return mine
    # Groups of experts that are not shared out speak NCCL alone.
    device = "cpu" if "gloo" in dist.get_backend_config(group) else platform.device()
    here = torch.stack(mine).float().to(device)
    if group.rank() != owner:
        dist.send(here, group=group, group_dst=owner)
        return None
    parts = [here]
    for rank, size in holders[1:]:
        parts.append(torch.empty(len(STATES), size, device=device))
        dist.recv(parts[-1], group=group, group_src=rank)
    return [torch.cat([part[i] for part in parts]) for i in range(len(STATES))]


def _leaf(of_parameter: Sharded, name: str, state: torch.Tensor) -> Sharded:
    """A state's description: as the parameter's, on the one rank that has it."""
    changes = {
        "key": f"optimizer.state.{name}.{of_parameter.key}",
        "data": state.reshape(of_parameter.data.shape),
        "replica_id": (*of_parameter.replica_id[:-1], 0),
    }
    if isinstance(of_parameter, ShardedTensor):
        changes["dtype"] = state.dtype
    return replace(of_parameter, **changes)


def _own_ranges(
    optimizer: DistributedOptimizer, parameter: torch.nn.Parameter, of_parameter: Sharded
) -> dict[str, list[ShardedTensor]]:
    """Name of a state -> boxes of the checkpoint's tensors that make up this rank's range of it, loaded in place.

    Boxes cover the range exactly, so that no number is read twice and none needs memory besides the state itself.
    """
    held = optimizer._get_main_param_and_optimizer_states(parameter)
    start = optimizer._get_model_param_range_map(parameter)["param"].start
    ranges = {}
    for name in STATES:
        # On the meta device, without memory. A factory cuts a state into views that are stored as tensors of their own,
        # such as gate and up of an MLP.
        whole = _leaf(of_parameter, name, torch.empty(of_parameter.data.shape, device="meta"))
        stored = whole.build() if isinstance(whole, ShardedTensorFactory) else [whole]
        ranges[name] = [box for part in nested_values(stored) for box in _boxes_of(part, held[name].detach(), start)]
    return ranges


def _boxes_of(stored: ShardedTensor, own: torch.Tensor, start: int) -> Iterator[ShardedTensor]:
    """Boxes of a stored tensor that lie in this rank's range: `own` holds the numbers from `start` on."""
    if not stored.data.is_contiguous():
        raise NotImplementedError(f"{stored.key} is stored in another order of its numbers than the parameter's")
    first = stored.data.storage_offset()
    begin, end = max(start, first), min(start + own.numel(), first + stored.data.numel())
    shape = (1,) * stored.prepend_axis_num + stored.local_shape
    for offsets, sizes in boxes(shape, begin - first, end - first):
        data = own[begin - start :][: prod(sizes)].view(sizes)
        begin += data.numel()
        yield replace(
            stored,
            data=data,
            local_shape=sizes,
            global_offset=tuple(map(add, stored.global_offset, offsets)),
            axis_fragmentations=None,  # boxes make up no regular grid
            prepend_axis_num=0,
        )


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cover the numbers `start` to `stop` of a tensor by boxes, in their order."""
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
