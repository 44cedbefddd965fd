"""Compare two folders of weights bitwise, tensor by tensor."""

import argparse
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from megappo.architecture.architecture import Architecture
from megappo.architecture.families import FAMILIES, language_model
from megappo.architecture.model_folder import CONFIG_FILE, named_architecture
from megappo.architecture.parameters import EMBEDDING, LM_HEAD, VALUE_BIAS
from megappo.architecture.parsing import read_architecture
from megappo.checkpoint.folders import components_of, is_component
from megappo.models.megatron_config import TORCH_DTYPES
from megappo.weights.export import Export
from megappo.weights.hf_folder import critic_buckets
from megappo.weights.load import has_value_head, is_unused, name_value_head
from megappo.weights.safetensors_io import HFFolder
from megappo_tools.conversion.commands import load_from_megatron, open_megatron, refuse_step
from megappo_tools.conversion.differences import difference_of
from megappo_tools.conversion.megatron_folders import compare_megatron
from megappo_tools.conversion.world import World

BUCKET_BYTES = 256 * 2**20


def verify(args: argparse.Namespace, world: World) -> int:
    """Print every difference between two folders and return 1 if there are any.

    Two training checkpoints are compared one component after the other.
    """
    first, second = ({path.name: path for path in components_of(folder)} for folder in (args.input, args.output))
    if not (first and second):
        return _verify(args, world)
    for name in sorted(first.keys() ^ second.keys()):
        world.log(f"{name}: only in {args.input if name in first else args.output}")
    found = [first.keys() != second.keys()]
    for name in sorted(first.keys() & second.keys()):
        world.log(f"{name}:")
        found.append(_verify(argparse.Namespace(**vars(args) | {"input": first[name], "output": second[name]}), world))
    return int(any(found))


def _verify(args: argparse.Namespace, world: World) -> int:
    megatron = [folder for folder in (args.input, args.output) if is_component(folder)]
    comparison = compare_megatron(args, world) if len(megatron) == 2 else _compare(megatron, args, world)
    for line in comparison.lines:
        world.log(line)
    num_differences = sum(world.exchange.all_gather(len(comparison.lines)))
    if num_differences:
        world.log(f"{num_differences} difference{'s' if num_differences > 1 else ''}")
        return 1
    world.log(f"equal to the bit: {comparison.num_tensors} tensors, {comparison.num_elements:,} {comparison.unit}")
    return 0


def _compare(megatron: list[Path], args: argparse.Namespace, world: World) -> "Comparison":
    """Compare a Hugging Face folder with another one, or with the exported tensors of a Megatron folder."""
    folders = [args.input, args.output]
    for folder in folders:
        refuse_step(folder)
    first = megatron[0] if megatron else args.input
    second = folders[1 - folders.index(first)]
    architecture = _architecture_of(second, args.hf_config)
    with HFFolder(second, architecture) as source:  # fused experts are split, as in an export
        named = _of_megatron(first, args, source, world) if megatron else _of_hf(first, args.hf_config)
        cast = {args.input: TORCH_DTYPES[args.dtype]} if args.dtype else {}
        comparison = Comparison(first, source, _used_names(source, architecture), cast)
        total = sum(prod(source.shape(name)) for name in comparison.missing)
        with world.bar("comparing", total, "parameters") as bar:
            for name, tensor in named:
                if world.rank == 0:
                    comparison.add(name, tensor)
                bar.update(tensor.numel())
        if world.rank == 0:
            comparison.finish()
    return comparison


class Comparison:
    """Differences between a stream of tensors and a Hugging Face folder.

    Attributes:
        lines: the differences, one line each.
        missing: names of the tensors that have yet to come.
        num_tensors: tensors compared so far, with `num_elements` in `unit`.
    Args:
        first: folder of the tensors in the stream.
        names: tensors of `second` that must be in the stream.
        cast: dtype that a folder's tensors are cast to first.
    """

    def __init__(self, first: Path, second: HFFolder, names: list[str], cast: dict[Path, torch.dtype]):
        self.first, self.second, self.cast = first, second, cast
        self.missing = set(names)
        self.lines: list[str] = []
        self.unit = "parameters"
        self.num_tensors = self.num_elements = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Compare a tensor of the stream."""
        self.num_tensors += 1
        self.num_elements += tensor.numel()
        if name not in self.missing:
            self.lines.append(f"{name}: only in {self.first}")
            return
        self.missing.remove(name)
        found, other = self._cast(self.first, tensor), self._cast(self.second.folder, self.second.read(name))
        difference = difference_of(found, other)
        if difference:
            self.lines.append(f"{name}: {difference}")

    def finish(self) -> None:
        """Count missing tensors as differences."""
        self.lines += [f"{name}: only in {self.second.folder}" for name in sorted(self.missing)]

    def _cast(self, folder: Path, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().to(self.cast.get(folder, tensor.dtype))


def _architecture_of(folder: Path, config_folder: Path | None) -> Architecture | None:
    """Return the architecture of a Hugging Face folder; None if its family is unknown."""
    for path in (folder, config_folder):
        if path and (path / CONFIG_FILE).is_file():
            known = language_model(named_architecture(path) or "") in FAMILIES
            return read_architecture(path, head="value") if known else None
    return None


def _used_names(source: HFFolder, architecture: Architecture | None) -> list[str]:
    """Return the names of the tensors that a load reads."""
    return sorted(name for name in source.names() if not is_unused(name, architecture))


def _of_hf(folder: Path, config_folder: Path | None) -> Iterator[tuple[str, torch.Tensor]]:
    architecture = _architecture_of(folder, config_folder)
    with HFFolder(folder, architecture) as source:
        for name in _used_names(source, architecture):
            yield name, source.read(name)


def _of_megatron(
    folder: Path, args: argparse.Namespace, other: HFFolder, world: World
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the exported tensors of a Megatron folder.

    A zero value bias is skipped where `other` has none; tied embeddings are yielded twice where `other` has both.
    """
    source = open_megatron(folder, args.hf_config)
    exported = source.architecture
    if exported.head == "policy_value" and not has_value_head(other):
        exported = exported.with_head("policy")
    chunks = load_from_megatron(source, source.dtype, world)
    buckets = Export(chunks, exported, world.groups, with_stacks=False).buckets(BUCKET_BYTES)
    if exported.head != "policy":
        name_value_head(other)
        buckets = critic_buckets(buckets)
    for bucket in buckets:
        for name, tensor in bucket:
            if name == VALUE_BIAS and name not in other.names() and not tensor.any():
                continue  # *ForSequenceClassification has none
            yield name, tensor
            if name == EMBEDDING and exported.head == "policy" and exported.tied and LM_HEAD in other.names():
                yield LM_HEAD, tensor
