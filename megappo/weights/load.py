"""Loading Hugging Face weights into a Megatron model: each rank reads its own slices of the files, nothing else.

A critic starts from a language model or a reward model, whose head has one of several names.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megappo.architecture.architecture import Architecture
from megappo.architecture.model_folder import HEAD_MODULES
from megappo.architecture.parameters import (
    EMBEDDING,
    LM_HEAD,
    LORA_B,
    VALUE_BIAS,
    VALUE_HEAD,
    HFTensor,
    Parameter,
    expert_stacks,
    hf_tensors_of,
    is_adapter,
    linear_stacks,
)
from megappo.architecture.parsing import read_architecture
from megappo.architecture.vision import TOWER
from megappo.config.config_error import listed
from megappo.config.methods import ValueSupport
from megappo.errors import ActionableError
from megappo.models.gpt import ModelChunks
from megappo.placement.groups import ComponentGroups
from megappo.runtime.heartbeat import heartbeat
from megappo.weights.safetensors_io import HFFolder
from megappo.weights.shards import check_parameters, decompose, global_parameters, shard_group, table_of

UNUSED_SUFFIXES = ("rotary_emb.inv_freq",)  # a constant that old checkpoints saved


def is_unused(name: str, architecture: Architecture | None) -> bool:
    """Return whether a tensor is not loaded: a constant, or one of the layers that predict further tokens. Those are
    neither trained nor exported; transformers leaves them out too. `architecture` is None for a folder without
    config.json."""
    return name.endswith(UNUSED_SUFFIXES) or bool(architecture and architecture.predicts_further(name))


def folder_shapes(folder: str | Path, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that an engine loads from a model's folder, from the files' headers.

    Raises: as `load_hf`.
    """
    left_out = {VALUE_HEAD, VALUE_BIAS}
    if architecture.tied:
        left_out.add(LM_HEAD)
    with HFFolder(folder, architecture) as source:
        name_value_head(source)
        stack_of = {}
        for name, stack in expert_stacks(architecture).items():
            stack_of |= dict.fromkeys(stack.parts, (name, stack.shape))
        for name, parts in linear_stacks(architecture).items():
            shapes = [source.shape(part) for part in parts]
            num_rows = sum(rows for rows, *_ in shapes)
            _, *columns = shapes[0]
            stack_of |= dict.fromkeys(parts, (name, (num_rows, *columns)))
        found = {}
        for name in source.names() - left_out:
            if not is_unused(name, architecture):
                own, shape = stack_of.get(name) or (name, source.shape(name))
                found[own] = shape
        return found


@torch.no_grad()
def load_hf(
    chunks: ModelChunks,
    folder: str | Path,
    architecture: Architecture,
    groups: ComponentGroups,
    *,
    seed: int = 0,
    base: ModelChunks | None = None,
    adapter: str | None = None,
    progress: Callable[[str], object] = lambda name: None,
) -> None:
    """Fill the parameters this rank holds from a folder of safetensors. Call it before the optimizer copies them.

    Values are cast to the parameters' dtype; rows of padded vocabulary become 0. No rank talks to another.

    Args:
        architecture: the folder's, of which `chunks` were built. A value head comes from the folder if it has one with
            the same outputs (see `critic_architecture`), and is drawn from `seed` otherwise, the same on every rank,
            as are adapters. A critic leaves the language model's own head unused.
        base: the model whose weights, loaded already, this one uses.
        adapter: folder of the adapters and the value head, see `read_lora`.
        progress: called with the name of every parameter that is loaded.
    Raises:
        ActionableError: a parameter without source, a tensor missing, unused, of another shape, or with values that are
            not finite; each named.
        FileNotFoundError: the folder, or a file of it, is missing.
    """
    table = table_of(architecture, groups)
    parameters = global_parameters(chunks)
    check_parameters(parameters, table)
    loaded = {id(parameter) for chunk in base or () for parameter in chunk.parameters()}
    with HFFolder(folder, architecture) as source:
        if adapter:
            source.add_adapters(adapter)
        _check_source(source, architecture, table, has_adapters=adapter is not None)
        for name, parameter in parameters.items():
            heartbeat.beat()
            progress(name)
            if id(parameter) in loaded or name.startswith(TOWER):  # a tower reads its own weights
                continue
            shards = decompose(parameter, table[name])
            for hf in table[name].hf_tensors:
                if is_adapter(name) and adapter is None:
                    _draw_adapter(shards[hf.name], hf, groups, seed)
                elif hf.name == VALUE_HEAD and VALUE_HEAD not in source.names():
                    chunks[-1].get_submodule(name.removesuffix(".weight")).init_weight(seed)
                else:
                    _fill(shards[hf.name], source, hf, groups)


def _check_source(
    source: HFFolder,
    architecture: Architecture,
    table: Mapping[str, Parameter],
    *,
    has_adapters: bool,
) -> None:
    """Name the value head as the table does, and check that the folder has the table's tensors, and no others."""
    expected = hf_tensors_of(entry for name, entry in table.items() if has_adapters or not is_adapter(name))
    optional = {LM_HEAD} if architecture.head == "value" or architecture.tied else set()
    if architecture.head != "policy":
        optional |= {VALUE_HEAD} if architecture.value_bias else {VALUE_HEAD, VALUE_BIAS}
        name_value_head(source)
        leave_out_other_head(source, architecture)
        if has_value_bias(source) and not architecture.value_bias:
            raise ActionableError(
                f"the value head in {source.folder} has a bias that is not zero, but the model was built without one; "
                "a shared backbone's has none: train a separate critic, or remove the bias"
            )
    found = {name for name in source.names() if not is_unused(name, architecture)}
    missing = sorted(expected.keys() - found - optional)
    unused = sorted(found - expected.keys() - optional)
    if missing or unused:
        raise ActionableError(
            f"{source.folder} does not hold the tensors its config.json describes: missing "
            f"{listed(missing)}; unknown {listed(unused)}; check its "
            "architecture and num_hidden_layers, and that the folder is complete"
        )
    for name in sorted(found & expected.keys()):
        if source.shape(name) != expected[name].shape:
            raise ActionableError(
                f"{name} in {source.folder} has shape {[*source.shape(name)]}, but its config.json gives "
                f"{[*expected[name].shape]}"
            )
    is_repeated = architecture.ties_output and LM_HEAD in found
    if is_repeated and not torch.equal(source.read(EMBEDDING), source.read(LM_HEAD)):
        raise ActionableError(
            f"config.json of {source.folder} ties the embeddings, but {LM_HEAD} differs from {EMBEDDING}; "
            "set tie_word_embeddings to false, or remove the tensor"
        )


def _fill(
    shard: torch.Tensor,
    source: HFFolder,
    hf: HFTensor,
    groups: ComponentGroups,
) -> None:
    """Copy this rank's shard of a tensor into its place in the parameter, [groups, rows per group, ...]; padding is 0.

    The files are mapped into memory, so that nothing but the parameter itself takes any.
    """
    dim = hf.shard_dim or 0
    start = 0
    stop = None
    if hf.shard_dim is not None:
        rank = shard_group(hf, groups).rank()
        size = hf.shard_shape[dim]
        whole = hf.shape[dim]
        start = min(rank * size, whole)
        stop = min((rank + 1) * size, whole)
    read = source.read_finite(hf.name, dim, start, stop)
    if read.shape == hf.shard_shape:
        shard.copy_(read.unflatten(0, shard.shape[:2]))
        return
    [rows] = shard  # of the vocabulary, which is one group
    rows[: len(read)] = read
    rows[len(read) :] = 0


def _draw_adapter(
    part: torch.Tensor,
    hf: HFTensor,
    groups: ComponentGroups,
    seed: int,
) -> None:
    """Fill this rank's shard of an adapter's matrix: b with 0, so that nothing is added yet, and a with numbers drawn
    evenly up to in^-1/2. Each rank draws all of a, so that it does not depend on the layout.

    Source: PEFT, LoraLayer.reset_lora_parameters.
    """
    if hf.name.endswith(LORA_B):
        part.zero_()
        return
    generator = torch.Generator().manual_seed(seed % 2**32 * 2**32 + zlib.crc32(hf.name.encode()))
    shard = torch.empty(hf.shape).uniform_(-1, 1, generator=generator) / math.sqrt(hf.shape[1])
    if hf.shard_dim is not None:
        size = hf.shard_shape[hf.shard_dim]
        shard = shard.narrow(hf.shard_dim, shard_group(hf, groups).rank() * size, size)
    part.copy_(shard.unflatten(0, part.shape[:2]))


def critic_architecture(
    folder: str | Path, support: ValueSupport | None = None, *, needs_head: bool = True
) -> Architecture:
    """Return the architecture that a critic starts from, under a value head. The head has a bias if a reward model's
    is not zero; a bias of zero is dropped.

    Args:
        folder: a language model, or a reward model: *ForSequenceClassification, *ForTokenClassification, or a language
            model with a value head besides (see `HEAD_MODULES`).
        support: meaning of the critic's outputs.
        needs_head: a reward model's own head is used; else one with other outputs is left out.
    Raises:
        ConfigError: its config.json cannot be used.
        ActionableError: a reward model without a known head, or, if it is needed, one with other outputs.
    """
    architecture = replace(read_architecture(folder, head="value"), support=support)
    with HFFolder(folder) as source:
        name_value_head(source)
        if architecture.is_reward_model and VALUE_HEAD not in source.names():
            raise ActionableError(
                f"{folder} is a {architecture.named} without a head: expected {VALUE_HEAD}, or the weight of one of "
                f"{', '.join(HEAD_MODULES[1:])}; its files are incomplete, or it is no reward model"
            )
        left_out = leave_out_other_head(source, architecture)
        if left_out and needs_head:
            raise ActionableError(
                f"the value head in {folder} gives {left_out} numbers per token, expected {support or 1}; choose a "
                "reward model of one label, or a critic of this program with its config.json"
            )
        return replace(architecture, value_bias=has_value_bias(source))


def name_value_head(source: HFFolder) -> None:
    """Call the folder's value head `score`, whatever it is called there.

    Raises:
        ActionableError: there are several.
    """
    found = [module for module in HEAD_MODULES if f"{module}.weight" in source.names()]
    if len(found) > 1:
        raise ActionableError(f"{source.folder} has several value heads: {', '.join(found)}; remove all but one")
    for module in found:
        names = {f"{module}.weight": VALUE_HEAD, f"{module}.bias": VALUE_BIAS}
        source.rename({old: new for old, new in names.items() if old in source.names()})


def leave_out_other_head(source: HFFolder, architecture: Architecture) -> int:
    """Leave out a value head, called `score`, whose outputs have another meaning than the architecture's. Return the
    number of its outputs, or 0 if there is none."""
    if VALUE_HEAD not in source.names():
        return 0
    num_outputs = source.shape(VALUE_HEAD)[0]
    if architecture.takes_head(num_outputs):
        return 0
    source.leave_out((VALUE_HEAD, VALUE_BIAS))
    return num_outputs


def has_value_head(source: HFFolder) -> bool:
    """Return whether the folder has a value head, under any of its names."""
    return any(f"{module}.weight" in source.names() for module in HEAD_MODULES)


def has_value_bias(source: HFFolder) -> bool:
    """Return whether the folder's value head adds something other than zero."""
    return VALUE_BIAS in source.names() and bool(source.read(VALUE_BIAS).any())
