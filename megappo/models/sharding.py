"""A model and its optimizer as dist_checkpointing takes them, whichever layout they are in.

The optimizer's states are saved by parameter. Each rank writes and loads its own range of each.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from operator import add
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megappo.models.gpt import ModelChunks
from megappo.placement.groups import ComponentGroups

STATES = ("param", "exp_avg", "exp_avg_sq")

Sharded = ShardedTensor | ShardedTensorFactory
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes in a tensor."""


def sharding_metadata(groups: ComponentGroups) -> dict[str, Any]:
    """Return the `metadata` of `sharded_state_dict`, for checkpoints that load into any other layout."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": groups.collection.dp_cp,
    }


def sharded_chunks(
    chunks: ModelChunks, groups: ComponentGroups, *, stacks_layers: bool = True
) -> dict[str, dict[str, Any]]:
    """Return the model as dist_checkpointing takes it, with layers numbered over the whole model.

    It is made of the unwrapped modules: the wrappers' own methods disagree about the prefix "module.". A model with
    adapters gives what is trained: the rest is in its folder.

    Args:
        stacks_layers: layers of one kind are one tensor, as in this program's checkpoints; or a tensor each.
    """
    metadata = sharding_metadata(groups) | {"non_homogeneous_layers": not stacks_layers}
    with groups.active():
        states = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    for state, chunk in zip(states.values(), chunks, strict=True):
        for name, parameter in chunk.named_parameters():
            if parameter.is_base:
                del state[name]
    return states


def sharded_optimizer(
    optimizer: ChainedOptimizer,
    model: dict[str, dict[str, Any]],
    groups: ComponentGroups,
    is_loading: bool,
) -> dict[str, Any]:
    """Return the optimizer of `sharded_chunks` as dist_checkpointing takes it. The component's groups are active."""
    state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=sharding_metadata(groups))
    for part in [state] if len(optimizer.chained_optimizers) == 1 else state.values():
        if not part.get("param_state", True):  # all on other ranks, or of no parameters: Megatron would warn
            del part["param_state"]
    return state


def sharded_states(
    optimizer: DistributedOptimizer,
    model: dict[str, Any],
    is_loading: bool,
    metadata: dict[str, Any],
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """Stand in for `DistributedOptimizer.sharded_param_state_fully_reshardable`.

    A rank writes its own range of each parameter's states, and a load reads it in place: the boxes of the checkpoint's
    tensors that it covers exactly. No number is sent or read twice, and none needs memory besides the state itself.
    """
    leaves = {leaf.data: leaf for leaf in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    states = {}
    for number, parameter in enumerate(optimizer.model_param_gbuf_map):
        held = optimizer._get_main_param_and_optimizer_states(parameter)
        start = optimizer._get_model_param_range_map(parameter)["param"].start
        states[number] = {name: _own_boxes(leaves[parameter], name, held[name].detach(), start) for name in STATES}
    return states


def _own_boxes(
    of_parameter: Sharded,
    name: str,
    own: Tensor,
    start: int,
) -> list[ShardedTensor]:
    """Return the boxes of a state's stored tensors that `own` holds: the state's numbers from `start` on."""
    # On the meta device, without memory. A factory cuts it into views that are stored as tensors of their own, such as
    # gate and up of an MLP.
    whole = replace(
        of_parameter,
        key=f"optimizer.state.{name}.{of_parameter.key}",
        data=torch.empty_like(of_parameter.data, device="meta"),
        replica_id=(*of_parameter.replica_id[:-1], 0),  # no other rank has these numbers
    )
    stored = whole.build() if isinstance(whole, ShardedTensorFactory) else [whole]
    return [box for part in nested_values(stored) for box in _boxes_of(part, own, start)]


def _boxes_of(stored: ShardedTensor, own: Tensor, start: int) -> Iterator[ShardedTensor]:
    """Yield the boxes of a stored tensor that lie in this rank's range: `own` holds the numbers from `start` on."""
    if not stored.data.is_contiguous():
        raise NotImplementedError(f"{stored.key} is stored in another order of its numbers than the parameter's")
    first = stored.data.storage_offset()
    begin = max(start, first)
    end = min(start + own.numel(), first + stored.data.numel())
    shape = (1,) * stored.prepend_axis_num + stored.local_shape
    for offsets, sizes in boxes(shape, begin - first, end - first):
        data = own[begin - start :][: prod(sizes)].view(sizes)
        begin += data.numel()
        yield replace(
            stored,
            data=data,
            dtype=own.dtype,
            local_shape=sizes,
            global_offset=tuple(map(add, stored.global_offset, offsets)),
            axis_fragmentations=None,  # boxes make up no regular grid
            prepend_axis_num=0,
        )


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cover the numbers `start` to `stop` of a tensor by boxes, in their order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    row = prod(inner)
    while start < stop:
        number, within = divmod(start, row)
        num_rows = (stop - start) // row
        if num_rows and not within:
            yield (number, *[0] * len(inner)), (num_rows, *inner)
            start += num_rows * row
        else:
            end = min(stop, (number + 1) * row)
            for offsets, sizes in boxes(inner, within, end - number * row):
                yield (number, *offsets), (1, *sizes)
            start = end
