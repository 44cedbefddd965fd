"""A model in a component's folder: saved, and resharded for another layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

from megappo.checkpoint.component_folder import check_vocabulary, load_component
from megappo.checkpoint.metadata import OPTIMIZER_PREFIX, ComponentInfo
from megappo.checkpoint.sharded import save_sharded
from megappo.models.gpt import ModelChunks
from megappo.models.sharding import sharded_chunks
from megappo.placement.groups import ComponentGroups

CHECKPOINT_VERSION = 3.0
"""Version that Megatron-LM writes: it takes weights without one for weights of 2019, and reorders queries, keys and
values."""


def save_model(chunks: ModelChunks, groups: ComponentGroups, folder: Path) -> None:
    """Write the model's part of a checkpoint into an existing folder; all ranks of the component together."""
    state = {"model": sharded_chunks(chunks, groups), "checkpoint_version": CHECKPOINT_VERSION, "iteration": 0}
    save_sharded(state, folder, groups.as_world)


def reshard(
    chunks: ModelChunks, groups: ComponentGroups, source: Path, info: ComponentInfo, target: Path, vocab_size: int
) -> dict[str, str]:
    """Write everything that `source` holds, including optimizer state, sharded for the layout of `chunks`.

    Args:
        chunks: built in the new layout; their weights are overwritten.
        info: facts about `source`.
        target: an existing folder.
        vocab_size: true vocabulary, without padding.
    Returns:
        path -> sum of each file that this rank wrote.
    Raises:
        CheckpointError: as `load_model`, or the target cannot be written.
    """
    check_vocabulary(chunks, source, info, vocab_size)
    state = {"model": _tensors(sharded_chunks(chunks, groups))}
    state["optimizer_tensors"] = _optimizer_tensors(state["model"], info)
    first = torch.distributed.get_rank(groups.collection.intra_dist_opt) == 0
    state["model"] |= {name: ShardedObject.empty_from_unique_key(name) for name in info.objects if first}
    loaded = load_component(state, groups, source, info, weights_only=False)
    # The result also has the unsharded state: learning-rate schedule and optimizer settings.
    filled = {
        part: {key: replace(leaf, data=loaded[part][key]) for key, leaf in leaves.items()}
        for part, leaves in state.items()
    }
    return save_sharded({**loaded, **filled}, target, groups.as_world)


def _tensors(state: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the sharded tensors of all chunks, without objects."""
    return {
        f"{chunk}.{key}": leaf
        for chunk, leaves in state.items()
        for key, leaf in leaves.items()
        if not isinstance(leaf, ShardedObject)
    }


def _optimizer_tensors(shards: dict[str, Any], info: ComponentInfo) -> dict[str, Any]:
    """Return the optimizer's tensors of every parameter on this rank, sharded like the parameter."""
    found = {}
    for key, leaf in shards.items():
        for name in info.tensors:
            if name.startswith(OPTIMIZER_PREFIX) and name.endswith(f".{leaf.key}"):
                prefix = name.removesuffix(f".{leaf.key}")
                values = torch.zeros_like(leaf.data, dtype=info.tensors[name].dtype)
                found[f"{prefix}.{key}"] = make_sharded_optimizer_tensor(leaf, values, prefix)
    return found
