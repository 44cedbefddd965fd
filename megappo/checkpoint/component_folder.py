"""A model in a component's folder, without the trainer: saved, loaded, resharded for another layout, read in rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException  # of any rank; not an Exception

from megappo.architecture.families import HeadKind
from megappo.architecture.parameters import OUTPUT_LAYER, SECOND_HEAD, is_adapter, padded_vocab_size
from megappo.checkpoint.folders import CheckpointError
from megappo.checkpoint.metadata import EMBEDDING, EXTRA_STATE, OPTIMIZER_PREFIX, ComponentInfo
from megappo.checkpoint.safe_reading import SafeReader
from megappo.checkpoint.sharded import load_sharded, reason, save_sharded
from megappo.config.config_error import shorten
from megappo.models.gpt import ModelChunks
from megappo.models.sharding import sharded_chunks
from megappo.placement.groups import ComponentGroups


def head_of(info: ComponentInfo) -> HeadKind:
    """Return the kind of head that the model has."""
    if f"{SECOND_HEAD}.weight" in info.tensors:
        return "policy_value"
    output_layer = info.tensors.get(f"{OUTPUT_LAYER}.weight")
    return "value" if output_layer is not None and output_layer.shape[0] == 1 else "policy"


def has_value_bias(info: ComponentInfo) -> bool:
    """Return whether the model's value head has a bias."""
    return bool({f"{SECOND_HEAD}.bias", f"{OUTPUT_LAYER}.bias"} & info.tensors.keys())


def save_model(chunks: ModelChunks, groups: ComponentGroups, folder: Path) -> None:
    """Write the model's part of a checkpoint into an existing folder; all ranks of the component together."""
    save_sharded({"model": sharded_chunks(chunks, groups)}, folder, groups.as_world)


def load_model(
    chunks: ModelChunks, groups: ComponentGroups, folder: Path, info: ComponentInfo, vocab_size: int
) -> None:
    """Fill the model from a component's folder, whatever layout it was written in; an optimizer's state is not read.

    Args:
        info: of `folder`.
        vocab_size: true vocabulary, without padding.
    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape, or damaged.
    """
    _check_vocabulary(chunks, folder, info, vocab_size)
    state = sharded_chunks(chunks, groups)
    apply_factories(state)
    _load({"model": state}, groups, folder, ignored=OPTIMIZER_PREFIX)


def reshard(
    chunks: ModelChunks, groups: ComponentGroups, source: Path, info: ComponentInfo, target: Path, vocab_size: int
) -> dict[str, str]:
    """Write everything that `source` holds, including optimizer state, sharded for the layout of `chunks`.

    Args:
        chunks: built in the new layout; their weights are overwritten.
        info: of `source`.
        target: an existing folder.
        vocab_size: true vocabulary, without padding.
    Returns:
        path -> sum of each file that this rank wrote.
    Raises:
        CheckpointError: as `load_model`, or the target cannot be written.
    """
    _check_vocabulary(chunks, source, info, vocab_size)
    state = {"model": _tensors(sharded_chunks(chunks, groups))}
    state["optimizer_tensors"] = _optimizer_tensors(state["model"], info)
    first = torch.distributed.get_rank(groups.collection.intra_dist_opt) == 0
    state["model"] |= {name: ShardedObject.empty_from_unique_key(name) for name in info.objects if first}
    loaded = _load(state, groups, source, ignored="")
    # The result also has the unsharded state: learning-rate schedule and optimizer settings.
    filled = {
        part: {key: replace(leaf, data=loaded[part][key]) for key, leaf in leaves.items()}
        for part, leaves in state.items()
    }
    return save_sharded({**loaded, **filled}, target, groups.as_world)


def read_rows(folder: Path, info: ComponentInfo, name: str, start: int, stop: int) -> torch.Tensor:
    """Rows start:stop along dimension 0 of a tensor, in its dtype, whatever layout it was written in. In this process
    alone; of the files, the pieces that these rows lie in are read one by one.

    Args:
        info: of `folder`.
    Raises:
        CheckpointError: they cannot be read.
    """
    tensor = info.tensors[name]
    rows = torch.empty(stop - start, *tensor.shape[1:], dtype=tensor.dtype)
    offset = (start, *[0] * (rows.ndim - 1))
    part = ShardedTensor(name, rows, rows.dtype, tuple(rows.shape), tensor.shape, offset, axis_fragmentations=None)
    try:
        checkpoint.load(
            {name: CheckpointableShardedTensor.from_sh_ten(part)},
            storage_reader=SafeReader(folder),
            no_dist=True,
        )
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"cannot read {name} in {folder}: {reason(error)}; copy the checkpoint again") from error
    return rows


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


def _check_vocabulary(chunks: ModelChunks, folder: Path, info: ComponentInfo, vocab_size: int) -> None:
    """Check the vocabulary, the one dimension that dist_checkpointing leaves: its padding depends on the layout."""
    found = info.tensors.get(EMBEDDING)
    if found is None:
        has_adapters = any(map(is_adapter, info.tensors))
        if has_adapters and any(parameter.is_base for parameter in chunks[0].parameters()):
            return
        raise CheckpointError(
            f"{folder} holds no {EMBEDDING}: it is no language model of this program, or holds only adapters (LoRA): "
            "set actor.lora as in that run, or use the run's hf_actor, which has them merged"
        )
    expected = padded_vocab_size(vocab_size, found.num_parts)
    if found.shape[0] != expected:
        raise CheckpointError(
            f"{EMBEDDING} in {folder} has {found.shape[0]} rows, but config.json's vocab_size {vocab_size} gives "
            f"{expected}: name the config.json the checkpoint was made with"
        )


def _load(state: dict[str, Any], groups: ComponentGroups, folder: Path, ignored: str) -> dict[str, Any]:
    """Load `state` from the folder. The folder may also hold objects, and tensors whose names start with `ignored`."""
    strict, replicas = StrictHandling.RETURN_ALL, groups.collection.dp_cp
    loaded, extra, absent = load_sharded(state, folder, groups.as_world, strict, replicas)
    unknown = {name for name in extra if EXTRA_STATE not in name and not (ignored and name.startswith(ignored))}
    missing = {name for name in absent if EXTRA_STATE not in name}
    if unknown or missing:
        found = f"missing {_listed(missing)}; unknown {_listed(unknown)}"
        raise CheckpointError(
            f"{folder} does not hold the tensors that config.json describes: {found}: name the config.json the "
            "checkpoint was made with"
        )
    return loaded


def _listed(names: set[str]) -> str:
    return shorten(", ".join(sorted(names)) or "none")
