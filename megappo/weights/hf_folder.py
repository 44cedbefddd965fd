"""Writing a model as a Hugging Face folder that transformers and SGLang load."""

import collections
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megappo.architecture.architecture import Architecture, dtype_name
from megappo.architecture.model_folder import ADAPTERS, PEFT_PREFIX, companions, write_model_config
from megappo.architecture.parameters import (
    LM_HEAD,
    LORA_A,
    LORA_B,
    VALUE_BIAS,
    VALUE_HEAD,
    hf_shapes,
)
from megappo.architecture.vision import name_in_files
from megappo.batch.rows_file import write_tensors
from megappo.config.model_sections import Lora
from megappo.models.gpt import ModelChunks
from megappo.placement.groups import ComponentGroups
from megappo.runtime.durable_files import naming
from megappo.weights.buckets import NamedTensors
from megappo.weights.export import Export
from megappo.weights.safetensors_io import ShardedWriter

ADAPTER_FOLDER = "adapter"


def write_hf_folder(
    chunks: ModelChunks,
    architecture: Architecture,
    groups: ComponentGroups,
    source: str | Path,
    target: str | Path,
    **sizes: int,
) -> None:
    """Write a model's weights to `target`, with config, tokenizer and generation config of `source`.

    With the head "policy" that is the language model: a value head that a shared backbone has besides is left out. With
    the others it is the critic, as *ForTokenClassification, or a model that scores rows, as *ForSequenceClassification:
    a language model's head is left out. Adapters are merged into the weights, and stand by themselves in the folder
    `adapter`, as PEFT has them.

    Every rank of the component calls it; its first rank writes, into `<target>.tmp`, which then takes the place of
    `target`. It is there when any rank returns.

    Args:
        architecture: architecture of `source`, under the head that is exported; written with the dtype of the weights.
        sizes: bucket_bytes, max_shard_bytes, as of `write_hf_files`.
    Raises:
        FileExistsError: `target` is a file.
        OSError: the folder cannot be written; `target` is then as it was before.
    """
    first = dist.get_rank() == groups.layout.ranks[0]
    with staged(Path(target)) if first else contextlib.nullcontext(Path(target)) as folder:
        write_hf_files(chunks, architecture, groups, source, folder, **sizes)
    dist.barrier(group=groups.collection.intra_dist_opt)


def write_hf_files(
    chunks: ModelChunks,
    architecture: Architecture,
    groups: ComponentGroups,
    source: str | Path,
    folder: Path,
    *,
    bucket_bytes: int = 512 * 2**20,
    max_shard_bytes: int = 2**30,
    progress: Callable[[int], object] = lambda elements: None,
) -> None:
    """Write as `write_hf_folder` does, into an existing folder. No rank waits for the first one to be done.

    Args:
        folder: folder into which the component's first rank writes.
        bucket_bytes: weights gathered at a time, on the device.
        max_shard_bytes: bytes per safetensors file, which the first rank holds until it is full.
        progress: called with the number of elements written, on that rank.
    Raises:
        OSError: a file cannot be written.
    """
    if architecture.lora is not None:
        _write_adapters(chunks, architecture, groups, source, folder / ADAPTER_FOLDER)
    first = groups.layout.ranks[0]
    export = Export(chunks, architecture, groups, full_tensor_ranks=(first,))
    is_first = dist.get_rank() == first
    if not export.participates:
        return
    buckets = _exported(export, architecture, bucket_bytes)
    if not is_first:
        collections.deque(buckets, maxlen=0)
        return
    writer = ShardedWriter(folder, max_shard_bytes)
    for bucket in map(partial(fuse_bucket, architecture), buckets):
        writer.add(bucket)
        progress(sum(tensor.numel() for _, tensor in bucket))
        del bucket  # before the next one is gathered
    writer.finish()
    write_model_config(architecture, folder, dtype_name(chunks[0].config.params_dtype))
    copy_companions(Path(source), folder)


def fuse_bucket(architecture: Architecture, bucket: NamedTensors) -> NamedTensors:
    """Return a bucket in which matrices that the family's files stack are one tensor, by the names in the files."""
    stack_of = {}
    for stack, parts in architecture.stacks.items():
        for part in parts:
            stack_of[f"{part}.weight"] = f"{stack}.weight"
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in bucket:
        in_files = name_in_files(stack_of.get(name, name), architecture.family.vision)
        found.setdefault(in_files, []).append(tensor)
    return [(name, torch.cat(tensors) if len(tensors) > 1 else tensors[0]) for name, tensors in found.items()]


def _exported(export: Export, architecture: Architecture, bucket_bytes: int) -> Iterable[NamedTensors]:
    """Return the buckets of a model, with a value head as files have it."""
    buckets = export.buckets(bucket_bytes)
    return buckets if architecture.head == "policy" else critic_buckets(buckets, has_bias=architecture.scores_rows)


def critic_buckets(buckets: Iterable[NamedTensors], has_bias: bool = False) -> Iterator[NamedTensors]:
    """Yield the buckets of a model with a value head as *ForTokenClassification has them.

    That has a bias always, so a head without one is given a zero, and it has no language model's head.

    Args:
        has_bias: add none, as *ForSequenceClassification has none.
    """
    weight = None
    for bucket in buckets:
        tensors = dict(bucket)
        weight = tensors.get(VALUE_HEAD, weight)
        has_bias = has_bias or VALUE_BIAS in tensors
        tensors.pop(LM_HEAD, None)
        yield list(tensors.items())
        del bucket, tensors  # before the next one is gathered
    if weight is not None and not has_bias:
        yield [(VALUE_BIAS, weight.new_zeros(len(weight)))]


def _write_adapters(
    chunks: ModelChunks,
    architecture: Architecture,
    groups: ComponentGroups,
    source: str | Path,
    folder: Path,
) -> None:
    """Write a model's adapters, and a value head, into `folder` on the component's first rank."""
    first = groups.layout.ranks[0]
    export = Export(chunks, architecture, groups, full_tensor_ranks=(first,), adapters=True)
    if not export.participates:
        return
    buckets = _exported(export, architecture, sum(tensor.nbytes for tensor in export.tensors))
    adapters = [one for bucket in buckets for one in bucket]
    if dist.get_rank() == first:
        folder.mkdir()
        write_adapters(folder, _fuse_adapters(architecture, adapters), architecture.lora, source)


def _fuse_adapters(architecture: Architecture, adapters: NamedTensors) -> NamedTensors:
    """Return adapters of the matrices that the family's files have, with the same products: for a stack, A is the As
    of its matrices below each other, and B has their Bs along its diagonal."""
    found = dict(adapters)
    shapes = hf_shapes(architecture)
    for stack, parts in architecture.stacks.items():
        downs = [found.pop(part + LORA_A) for part in parts if part + LORA_A in found]
        if not downs:
            continue
        ups = []
        for part in parts:
            num_rows, *_ = shapes[f"{part}.weight"]
            empty = downs[0].new_zeros(num_rows, 0)
            ups.append(found.pop(part + LORA_B, empty))
        found[stack + LORA_A] = torch.cat(downs)
        found[stack + LORA_B] = torch.block_diag(*ups)
    return list(found.items())


def copy_companions(source: Path, target: Path) -> None:
    """Copy what stands beside config and weights, for tokenizer and generation, unless `target` has it already."""
    for name in companions(source):
        if not (target / name).exists():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, target / name)


def peft_config(lora: Lora) -> dict[str, Any]:
    """Return PEFT's adapter_config.json."""
    sizes = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.modules)}
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", **sizes}


def write_adapters(folder: Path, adapters: NamedTensors, lora: Lora, base: str | Path) -> None:
    """Write whole adapters, and a value head among them, as PEFT does.

    Args:
        base: the folder of the model that they adapt.
    Raises:
        OSError: they cannot be written.
    """
    names = dict(adapters)
    tensors = {}
    ranks = {}  # of each module's matrix; a stack's has several adapters' together
    for name, tensor in adapters:
        tensors[PEFT_PREFIX + name] = tensor.contiguous()
        if name.endswith(LORA_A):
            ranks[name.split(".")[-3]] = len(tensor)
    write_tensors(folder / ADAPTERS, tensors, {"format": "pt"})

    stacks = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    own: dict[str, Any] = {
        "base_model_name_or_path": str(base),
        "target_modules": sorted(ranks),
    }
    if VALUE_HEAD in names:
        own["task_type"] = "TOKEN_CLS" if VALUE_BIAS in names else "SEQ_CLS"
        own["modules_to_save"] = [VALUE_HEAD.removesuffix(".weight")]
    own["rank_pattern"] = stacks
    own["alpha_pattern"] = {name: lora.scale * rank for name, rank in stacks.items()}
    config = peft_config(lora) | own
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def temporary_folder(target: Path) -> Path:
    """Return the folder beside `target` that is written first and then renamed, within one file system."""
    return target.with_name(target.name + ".tmp")


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Make a new folder that takes the place of `target` when the block ends well, and is removed when it does not.

    The remains of a killed program are removed first.

    Raises:
        FileExistsError: `target` is a file.
        OSError: the folder cannot be made; `target` is as it was.
    """
    if target.is_file():
        raise FileExistsError(f"{target} is a file; name a folder to write to")
    temporary = temporary_folder(target)
    _remove(temporary)
    temporary.mkdir(parents=True)
    try:
        with naming(target):
            yield temporary
            _replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _replace(temporary: Path, target: Path) -> None:
    """Put the finished folder in the old one's place; a kill between the renames leaves the old one as `.old`."""
    old = target.with_name(target.name + ".old")
    _remove(old)
    try:
        if os.path.lexists(target):
            target.rename(old)
        temporary.rename(target)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(target):
            old.rename(target)
        raise
    _remove(old)


def _remove(folder: Path) -> None:
    """Remove a folder, or a link to one, if it is there. What the link leads to stays."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
