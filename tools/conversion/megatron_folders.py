"""Compare two Megatron folders: both are read side by side, some rows at a time, and neither model is built."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

from megappo.architecture.model_folder import CONFIG_FILE
from megappo.architecture.parsing import read_architecture
from megappo.checkpoint.folders import CheckpointError
from megappo.checkpoint.metadata import EMBEDDING, ComponentInfo, read_component
from megappo.checkpoint.safe_reading import SafeReader
from megappo.checkpoint.sharded import reason
from megappo.models.megatron_config import TORCH_DTYPES
from megappo_tools.conversion.differences import Pair, difference_of_parts
from megappo_tools.conversion.world import UsageError, World

PART_BYTES = 64 * 2**20
OVER_VOCABULARY = (EMBEDDING, "output_layer.weight")
"""Suffixes of tensors whose last rows may be padding, which depends on the layout that wrote them."""


@dataclass
class MegatronComparison:
    """Differences, one line each, and the amount of data compared."""

    lines: list[str] = field(default_factory=list)
    num_tensors: int = 0
    num_elements: int = 0
    unit: str = "elements"  # an optimizer's state has more than the model's parameters


def compare_megatron(args: argparse.Namespace, world: World) -> MegatronComparison:
    """Compare the tensors of two Megatron folders under Megatron's names, including an optimizer's where both have one.

    Raises:
        UsageError: there are several processes, or it cannot be known how much of a vocabulary is padding.
    """
    if world.exchange.world_size > 1:
        raise UsageError("two Megatron folders are compared in one process, whatever their layouts: it builds no model")
    folders = {folder: read_component(folder) for folder in (args.input, args.output)}
    trained = [bool(info.tensors.keys() - info.model.keys()) for info in folders.values()]
    if trained[0] != trained[1]:
        world.log(f"only {list(folders)[trained.index(True)]} has an optimizer's state: it is left out")
    first, second = (info.tensors if all(trained) else info.model for info in folders.values())
    common = sorted(first.keys() & second.keys())
    comparison = MegatronComparison(
        [
            f"{name}: only in {folder}"
            for folder, own, others in zip(folders, (first, second), (second, first), strict=True)
            for name in sorted(own.keys() - others.keys())
        ]
    )
    rows = _rows_of_vocabulary(args, folders, common)
    with world.bar("comparing", sum(prod(first[name].shape) for name in common), "elements") as bar:
        for name in common:
            difference = _difference(name, args, folders, rows)
            comparison.lines += [f"{name}: {difference}"] if difference else []
            comparison.num_tensors += 1
            comparison.num_elements += prod(_compared_shape(first[name].shape, name, rows))
            bar.update(prod(first[name].shape))
    return comparison


def _difference(name: str, args: argparse.Namespace, folders: dict[Path, ComponentInfo], rows: int | None) -> str:
    """Describe how a tensor differs; "" if it is bitwise equal."""
    first, second = (info.tensors[name] for info in folders.values())
    shapes = [_compared_shape(tensor.shape, name, rows) for tensor in (first, second)]
    if shapes[0] != shapes[1]:
        return f"shape {[*first.shape]} against {[*second.shape]}"
    cast = TORCH_DTYPES[args.dtype] if args.dtype else first.dtype
    if cast != second.dtype:
        return f"dtype {str(cast).removeprefix('torch.')} against {str(second.dtype).removeprefix('torch.')}"
    return difference_of_parts(_parts(name, folders, shapes[0][0], cast))


def _parts(name: str, folders: dict[Path, ComponentInfo], stop: int, cast: torch.dtype) -> Iterator[Pair]:
    """Yield the first `stop` rows of both folders' tensors, some at a time."""
    (first, first_info), (second, second_info) = folders.items()
    shape = first_info.tensors[name].shape
    step = max(1, PART_BYTES // (4 * prod(shape[1:])))
    for start in range(0, stop, step):
        end = min(start + step, stop)
        found = read_rows(first, first_info, name, start, end).to(cast)
        yield found, read_rows(second, second_info, name, start, end)


def _compared_shape(shape: tuple[int, ...], name: str, rows: int | None) -> tuple[int, ...]:
    return (min(shape[0], rows), *shape[1:]) if rows and name.endswith(OVER_VOCABULARY) else shape


def _rows_of_vocabulary(args: argparse.Namespace, folders: dict[Path, ComponentInfo], names: list[str]) -> int | None:
    """Return the rows of the vocabulary without padding; None if unknown and irrelevant."""
    configs = [path for path in (args.hf_config, *folders) if path and (path / CONFIG_FILE).is_file()]
    if configs:
        return read_architecture(configs[0], head="value").vocab_size
    shapes = {info.tensors[EMBEDDING].shape for info in folders.values() if EMBEDDING in names}
    if len(shapes) > 1:
        raise UsageError(
            f"the vocabularies are padded to {' and '.join(str(shape[0]) for shape in sorted(shapes))} rows: name the "
            "Hugging Face folder the model started from with --hf-config"
        )
    return None


def read_rows(folder: Path, info: ComponentInfo, name: str, start: int, stop: int) -> torch.Tensor:
    """Rows start:stop along dimension 0 of a tensor, in its dtype, whatever layout it was written in. In this process
    alone; of the files, the pieces that these rows lie in are read one by one.

    Args:
        info: facts about `folder`.
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
