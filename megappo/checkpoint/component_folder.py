"""A model loaded from a component's folder, without the trainer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.validation import StrictHandling

from megappo.architecture.architecture import Architecture
from megappo.architecture.families import HeadKind
from megappo.architecture.parameters import OUTPUT_LAYER, SECOND_HEAD, is_adapter, padded_vocab_size
from megappo.checkpoint.folders import CheckpointError, stored_support
from megappo.checkpoint.metadata import EMBEDDING, EXTRA_STATE, ComponentInfo
from megappo.checkpoint.sharded import load_sharded
from megappo.config.config_error import listed
from megappo.config.methods import in_words
from megappo.models.gpt import ModelChunks
from megappo.models.sharding import sharded_chunks
from megappo.placement.groups import ComponentGroups

UNFUSED = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
"""Names of norms in Megatron-LM's layers without TransformerEngine, which fuses them with the next projection."""
MORE_PREDICTIONS = "mtp."
"""Prefix of layers for multi-token prediction, which this program does not have."""
ROWS_MULTIPLE = 128
"""Megatron-LM pads the vocabulary of each tensor-parallel rank to a multiple of it, by default."""


def head_of(info: ComponentInfo) -> HeadKind:
    """Return the kind of head that the model has."""
    if f"{SECOND_HEAD}.weight" in info.tensors:
        return "policy_value"
    output_layer = info.tensors.get(f"{OUTPUT_LAYER}.weight")
    if output_layer is None:
        return "policy"
    embedding = info.tensors.get(EMBEDDING)  # a critic's checkpoint beside adapters has none
    has_vocabulary = embedding is not None and embedding.shape[0] == output_layer.shape[0]
    return "policy" if has_vocabulary else "value"


def has_value_bias(info: ComponentInfo) -> bool:
    """Return whether the model's value head has a bias."""
    return bool({f"{SECOND_HEAD}.bias", f"{OUTPUT_LAYER}.bias"} & info.tensors.keys())


def load_initial(
    chunks: ModelChunks,
    groups: ComponentGroups,
    folder: Path,
    info: ComponentInfo,
    architecture: Architecture,
    seed: int,
) -> None:
    """Fill a new model as `load_model` does. A value head that the folder lacks, or that has other outputs, is drawn
    from `seed`.

    Raises:
        CheckpointError: as `load_model`; the folder's model has another kind of head; or values are not finite.
    """
    drawn = ""
    own_head = {"value": OUTPUT_LAYER, "policy_value": SECOND_HEAD}.get(architecture.head, "")
    if head_of(info) == "policy":
        drawn = own_head
    elif head_of(info) != architecture.head:
        raise CheckpointError(
            f"{folder} holds a {head_of(info)} model, but a {architecture.head} model is trained: name a language model"
        )
    elif (support := stored_support(folder, architecture.stored_support)) != architecture.support:
        drawn = own_head
        if dist.get_rank() == groups.layout.ranks[0]:
            found = f"the head in {folder} has {support or 'one output'}"
            print(f"a new value head, {in_words(architecture.support)}, as {found}", flush=True)
    if drawn:
        kept = {name: tensor for name, tensor in info.tensors.items() if not name.startswith(drawn)}
        info = replace(info, tensors=kept)
    load_model(chunks, groups, folder, info, architecture.vocab_size, drawn)
    if drawn and chunks[-1].post_process:
        chunks[-1].get_submodule(drawn).init_weight(seed)
    for name, weight in (pair for chunk in chunks for pair in chunk.named_parameters()):
        if not weight.isfinite().all():
            raise CheckpointError(f"{name} in {folder} holds values that are not finite: take an earlier iteration")


def load_model(
    chunks: ModelChunks,
    groups: ComponentGroups,
    folder: Path,
    info: ComponentInfo,
    vocab_size: int,
    drawn: str = "",
) -> None:
    """Fill the model from a component's folder, or a checkpoint of Megatron-LM, whatever layout it was written in. An
    optimizer's state is not read.

    Args:
        info: facts about `folder`.
        vocab_size: true vocabulary, without padding.
        drawn: module that is not loaded.
    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape, or damaged.
    """
    check_vocabulary(chunks, folder, info, vocab_size)
    state = sharded_chunks(chunks, groups, stacks_layers=not any(".layers.0." in name for name in info.model))
    for leaves in state.values() if drawn else ():
        for name in [name for name in leaves if name.startswith(drawn)]:
            del leaves[name]
    for leaf in nested_values(state):
        for fused, unfused in UNFUSED.items():
            if leaf.key not in info.tensors and leaf.key.replace(fused, unfused) in info.tensors:
                leaf.key = leaf.key.replace(fused, unfused)
    apply_factories(state)
    load_component({"model": state}, groups, folder, info, weights_only=True)


def check_vocabulary(
    chunks: ModelChunks,
    folder: Path,
    info: ComponentInfo,
    vocab_size: int,
) -> None:
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
    if found.shape[0] not in (expected, vocab_size, padded_vocab_size(vocab_size, ROWS_MULTIPLE * found.num_parts)):
        raise CheckpointError(
            f"{EMBEDDING} in {folder} has {found.shape[0]} rows, but config.json's vocab_size {vocab_size} gives "
            f"{expected}: name the config.json the checkpoint was made with"
        )


def load_component(
    state: dict[str, Any],
    groups: ComponentGroups,
    folder: Path,
    info: ComponentInfo,
    *,
    weights_only: bool,
) -> dict[str, Any]:
    """Load `state` from the folder. The folder may also hold objects.

    Args:
        info: facts about `folder`.
        weights_only: leave out the unsharded state, an optimizer's, and layers for multi-token prediction.
    Raises:
        CheckpointError: a tensor is missing or unknown, or the folder is damaged.
    """
    strict = StrictHandling.RETURN_ALL
    replicas = groups.collection.dp_cp
    loaded, extra, absent = load_sharded(state, folder, groups.as_world, strict, replicas, weights_only=weights_only)
    wanted = [name for name in info.model if not name.startswith(MORE_PREDICTIONS)] if weights_only else info.tensors
    unknown = {name for name in extra.intersection(wanted) if EXTRA_STATE not in name}
    missing = {name for name in absent if EXTRA_STATE not in name}
    if unknown or missing:
        found = f"missing {listed(sorted(missing))}; unknown {listed(sorted(unknown))}"
        raise CheckpointError(
            f"{folder} does not hold the tensors that config.json describes: {found}: name the config.json the "
            "checkpoint was made with"
        )
    return loaded
