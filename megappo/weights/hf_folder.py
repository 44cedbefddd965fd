"""Writing a model as a Hugging Face folder that transformers and SGLang load."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megappo.placement.groups import ComponentGroups
from megappo.weights.export import iter_hf_buckets
from megappo.weights.safetensors_io import ShardedWriter

_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def write_hf_folder(
    model: GPTModel,
    hf_config: dict[str, Any],
    groups: ComponentGroups,
    source: str | Path,
    target: str | Path,
    *,
    bucket_bytes: int = 512 * 2**20,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Write the language model's weights to `target`, with config, tokenizer and generation config of `source`.

    A value head that a shared backbone has besides is no part of it and is left out.

    Every rank of the component calls it; its first rank writes, into `<target>.tmp`, which then takes the place of
    `target`. It is there when any rank returns.

    Args:
        hf_config: config.json of `source`, written with the dtype of the weights.
        bucket_bytes: weights gathered at a time, on the device. max_shard_bytes: bytes per safetensors file, which the
            writing rank keeps in host memory.
    Raises:
        FileExistsError: `target` is a file.
        OSError: the folder cannot be written; `target` is then as it was before.
    """
    buckets = iter_hf_buckets(model, hf_config, groups, bucket_bytes)
    if dist.get_rank() == groups.layout.ranks[0]:
        dtype = str(model.config.params_dtype).removeprefix("torch.")
        _write(
            buckets, {**hf_config, "torch_dtype": dtype, "dtype": dtype}, Path(source), Path(target), max_shard_bytes
        )
    else:
        for _ in buckets:
            pass
    dist.barrier(group=groups.collection.intra_dist_opt)


def _write(
    buckets: Iterable[Iterable[tuple[str, torch.Tensor]]],
    hf_config: dict[str, Any],
    source: Path,
    target: Path,
    max_shard_bytes: int,
) -> None:
    if target.is_file():
        raise FileExistsError(f"{target} is a file; name a folder to write the Hugging Face model to")
    temporary = _empty_folder(target.with_name(target.name + ".tmp"))
    writer = ShardedWriter(temporary, max_shard_bytes)
    for bucket in buckets:
        writer.add(bucket)
    writer.finish()
    (temporary / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, temporary / name)
    _replace(temporary, target)


def _empty_folder(folder: Path) -> Path:
    """A new folder, in place of what a run that was cut short may have left."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _replace(temporary: Path, target: Path) -> None:
    """Put the finished folder in the old one's place; a crash between the renames leaves the old one as `.old`."""
    old = target.with_name(target.name + ".old")
    if old.exists():
        shutil.rmtree(old)
    if target.exists():
        target.rename(old)
    temporary.rename(target)
    if old.exists():
        shutil.rmtree(old)
