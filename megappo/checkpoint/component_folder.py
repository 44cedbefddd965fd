"""A model loaded from a component's folder, without the trainer."""

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.validation import StrictHandling

from megappo.architecture.parameters import is_adapter, padded_vocab_size
from megappo.checkpoint.folders import CheckpointError
from megappo.checkpoint.metadata import EMBEDDING, EXTRA_STATE, OPTIMIZER_PREFIX, ComponentInfo
from megappo.checkpoint.sharded import load_sharded
from megappo.config.config_error import listed
from megappo.models.gpt import ModelChunks
from megappo.models.sharding import sharded_chunks
from megappo.placement.groups import ComponentGroups


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
    check_vocabulary(chunks, folder, info, vocab_size)
    state = sharded_chunks(chunks, groups)
    apply_factories(state)
    load_component({"model": state}, groups, folder, ignored=OPTIMIZER_PREFIX)


def check_vocabulary(chunks: ModelChunks, folder: Path, info: ComponentInfo, vocab_size: int) -> None:
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


def load_component(state: dict[str, Any], groups: ComponentGroups, folder: Path, ignored: str) -> dict[str, Any]:
    """Load `state` from the folder. The folder may also hold objects, and tensors whose names start with `ignored`.

    Raises:
        CheckpointError: a tensor is missing or unknown, or the folder is damaged.
    """
    strict, replicas = StrictHandling.RETURN_ALL, groups.collection.dp_cp
    loaded, extra, absent = load_sharded(state, folder, groups.as_world, strict, replicas)
    unknown = {name for name in extra if EXTRA_STATE not in name and not (ignored and name.startswith(ignored))}
    missing = {name for name in absent if EXTRA_STATE not in name}
    if unknown or missing:
        found = f"missing {listed(sorted(missing))}; unknown {listed(sorted(unknown))}"
        raise CheckpointError(
            f"{folder} does not hold the tensors that config.json describes: {found}: name the config.json the "
            "checkpoint was made with"
        )
    return loaded
