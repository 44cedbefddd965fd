"""Comparing two folders of weights, tensor by tensor, to the bit."""

import argparse
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from conversion.commands import load_from_megatron, open_megatron, refuse_step
from conversion.differences import difference_of
from conversion.megatron_folders import compare_megatron
from conversion.world import World
from megappo.architecture.families import FAMILIES, HeadKind, is_tied, language_model
from megappo.architecture.parameters import EMBEDDING, LM_HEAD, VALUE_BIAS
from megappo.checkpoint.metadata import components_of, is_component
from megappo.models.hf_config import DTYPES
from megappo.weights.critic import critic_buckets, has_value_head, name_value_head, read_hf_config
from megappo.weights.export import Export
from megappo.weights.fused_experts import PerExpertFolder
from megappo.weights.load import is_unused
from megappo.weights.safetensors_io import HFFolder

BUCKET_BYTES = 256 * 2**20


def verify(args: argparse.Namespace, world: World) -> int:
    """Print every difference between two folders, of two training checkpoints one component after the other; 1 if there
    are any."""
    first, second = ({path.name: path for path in components_of(folder)} for folder in (args.input, args.output))
    if not (first and second):
        return _verify(args, world)
    for name in sorted(first.keys() ^ second.keys()):
        world.say(f"{name}: only in {args.input if name in first else args.output}")
    found = [first.keys() != second.keys()]
    for name in sorted(first.keys() & second.keys()):
        world.say(f"{name}:")
        found.append(_verify(argparse.Namespace(**vars(args) | {"input": first[name], "output": second[name]}), world))
    return int(any(found))


def _verify(args: argparse.Namespace, world: World) -> int:
    megatron = [folder for folder in (args.input, args.output) if is_component(folder)]
    comparison = compare_megatron(args, world) if len(megatron) == 2 else _compare(megatron, args, world)
    for line in comparison.lines:
        world.say(line)
    num_differences = sum(world.exchange.share(len(comparison.lines)))
    if num_differences:
        world.say(f"{num_differences} difference{'s' if num_differences > 1 else ''}")
        return 1
    world.say(f"equal to the bit: {comparison.num_tensors} tensors, {comparison.num_elements:,} {comparison.unit}")
    return 0


def _compare(megatron: list[Path], args: argparse.Namespace, world: World) -> "Comparison":
    """A Hugging Face folder with another, or with a Megatron one, whose tensors come as its export has them."""
    folders = [args.input, args.output]
    for folder in folders:
        refuse_step(folder)
    first = megatron[0] if megatron else args.input
    second = folders[1 - folders.index(first)]
    hf_config = _config_of(second, args.hf_config)
    with _opened(second, hf_config) as source:
        named = _of_megatron(first, args, source, world) if megatron else _of_hf(first, args.hf_config)
        cast = {args.input: DTYPES[args.dtype]} if args.dtype else {}
        comparison = Comparison(first, source, _used_names(source, hf_config), cast)
        total = sum(prod(source.shape(name)) for name in comparison.left)
        with world.bar("comparing", total, " parameters") as bar:
            for name, tensor in named:
                if world.rank == 0:
                    comparison.add(name, tensor)
                bar.update(tensor.numel())
        if world.rank == 0:
            comparison.finish()
    return comparison


class Comparison:
    """What differs between tensors that come one by one and a Hugging Face folder.

    Attributes:
        lines: the differences, one line each.
        num_tensors: that came, with `num_elements` in `unit`.
    Args:
        first: folder of the tensors that come.
        names: of the tensors of `second` that must come.
        cast: dtype that a folder's tensors are cast to first.
    """

    def __init__(self, first: Path, second: HFFolder, names: list[str], cast: dict[Path, torch.dtype]):
        self.first, self.second, self.cast = first, second, cast
        self.left = set(names)
        self.lines: list[str] = []
        self.unit = "parameters"
        self.num_tensors = self.num_elements = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Compare one of the tensors."""
        self.num_tensors += 1
        self.num_elements += tensor.numel()
        if name not in self.left:
            self.lines.append(f"{name}: only in {self.first}")
            return
        self.left.remove(name)
        found, other = self._cast(self.first, tensor), self._cast(self.second.folder, self.second.read(name))
        difference = difference_of(found, other)
        if difference:
            self.lines.append(f"{name}: {difference}")

    def finish(self) -> None:
        """Count what did not come as differences."""
        self.lines += [f"{name}: only in {self.second.folder}" for name in sorted(self.left)]

    def _cast(self, folder: Path, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().to(self.cast.get(folder, tensor.dtype))


def _config_of(folder: Path, config_folder: Path | None) -> dict[str, Any]:
    """The config.json of a Hugging Face folder if it is of a known family, as the language model's; {} if not."""
    configs = [path for path in (folder, config_folder) if path and (path / "config.json").is_file()]
    hf_config = read_hf_config(configs[0]) if configs else {}
    architectures = [language_model(name) for name in hf_config.get("architectures") or []]
    return {**hf_config, "architectures": architectures} if FAMILIES.keys() & set(architectures[:1]) else {}


def _opened(folder: Path, hf_config: dict[str, Any]) -> HFFolder:
    """A Hugging Face folder; one of fused experts has a tensor for each matrix of each, as the export does."""
    return PerExpertFolder(folder, hf_config) if hf_config else HFFolder(folder)


def _used_names(source: HFFolder, hf_config: dict[str, Any]) -> list[str]:
    """The tensors that are loaded."""
    return sorted(name for name in source.names() if not is_unused(name, hf_config))


def _of_hf(folder: Path, config_folder: Path | None) -> Iterator[tuple[str, torch.Tensor]]:
    hf_config = _config_of(folder, config_folder)
    with _opened(folder, hf_config) as source:
        for name in _used_names(source, hf_config):
            yield name, source.read(name)


def _of_megatron(
    folder: Path, args: argparse.Namespace, other: HFFolder, world: World
) -> Iterator[tuple[str, torch.Tensor]]:
    """A Megatron folder's tensors as its export has them; what `other` leaves out or repeats rightly is left out."""
    source = open_megatron(folder, args.hf_config)
    head: HeadKind = "policy" if source.head == "policy_value" and not has_value_head(other) else source.head
    chunks = load_from_megatron(source, source.dtype, world)
    buckets = Export(chunks, source.hf_config, world.groups, head=head).buckets(BUCKET_BYTES)
    if head != "policy":
        name_value_head(other)
        buckets = critic_buckets(buckets)
    for bucket in buckets:
        for name, tensor in bucket:
            if name == VALUE_BIAS and name not in other.names() and not tensor.any():
                continue  # *ForSequenceClassification has none
            yield name, tensor
            if name == EMBEDDING and head == "policy" and is_tied(source.hf_config) and LM_HEAD in other.names():
                yield LM_HEAD, tensor
