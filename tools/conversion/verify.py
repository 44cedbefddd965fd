"""Comparing two folders of weights, tensor by tensor, to the bit."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from conversion.commands import load_from_megatron, open_megatron
from conversion.world import UsageError, World
from megappo.checkpoint.metadata import is_component
from megappo.models.hf_config import DTYPES, HeadKind, is_tied
from megappo.weights.critic import critic_buckets, has_value_head, name_value_head
from megappo.weights.export import iter_hf_buckets
from megappo.weights.families import EMBEDDING, LM_HEAD, VALUE_BIAS
from megappo.weights.load import UNUSED_SUFFIXES
from megappo.weights.safetensors_io import HFFolder

BUCKET_BYTES = 256 * 2**20


def verify(args: argparse.Namespace, world: World) -> int:
    """Print every difference between two folders; 1 if there are any."""
    folders = [args.input, args.output]
    megatron = [folder for folder in folders if is_component(folder)]
    if len(megatron) == 2:
        raise UsageError(
            f"{args.input} and {args.output} are both Megatron folders: convert one with megatron-to-hf, "
            "and compare the result"
        )
    first = megatron[0] if megatron else args.input
    second = folders[1 - folders.index(first)]
    cast = {args.input: DTYPES[args.dtype]} if args.dtype else {}
    with HFFolder(second) as source:
        named = _of_megatron(first, args, source, world) if megatron else _of_hf(first)
        comparison = Comparison(first, source, cast)
        for name, tensor in named:
            if world.rank == 0:
                comparison.add(name, tensor)
        differences = comparison.finish() if world.rank == 0 else []
    for line in differences:
        world.say(line)
    num_differences = sum(world.exchange.share(len(differences)))
    if num_differences:
        world.say(f"{num_differences} difference{'s' if num_differences > 1 else ''}")
        return 1
    world.say(f"equal to the bit: {comparison.num_tensors} tensors, {comparison.num_elements:,} parameters")
    return 0


class Comparison:
    """What differs between tensors that come one by one and a Hugging Face folder.

    Args:
        first: folder of the tensors that come.
        cast: dtype that a folder's tensors are cast to first.
    """

    def __init__(self, first: Path, second: HFFolder, cast: dict[Path, torch.dtype]):
        self.first, self.second, self.cast = first, second, cast
        self.left = {name for name in second.names() if not name.endswith(UNUSED_SUFFIXES)}
        self.lines: list[str] = []
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
        difference = _difference(found, other)
        if difference:
            self.lines.append(f"{name}: {difference}")

    def finish(self) -> list[str]:
        """Every difference, one line each."""
        return self.lines + [f"{name}: only in {self.second.folder}" for name in sorted(self.left)]

    def _cast(self, folder: Path, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().to(self.cast.get(folder, tensor.dtype))


def _difference(found: torch.Tensor, other: torch.Tensor) -> str:
    """How two tensors differ; "" if they are equal to the bit."""
    for what in ("shape", "dtype"):
        if getattr(found, what) != getattr(other, what):
            return f"{what} {_shown(getattr(found, what))} against {_shown(getattr(other, what))}"
    found, other = found.contiguous().flatten(), other.contiguous().flatten()
    differs = (found.view(torch.uint8) != other.view(torch.uint8)).unflatten(0, (found.numel(), -1)).any(dim=1)
    if not differs.any():
        return ""
    largest = (found[differs].double() - other[differs].double()).abs().max()
    return f"{int(differs.sum())} of {found.numel()} elements differ, by up to {largest:.3g}"


def _shown(value: object) -> str:
    return str([*value]) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")


def _of_hf(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with HFFolder(folder) as source:
        for name in sorted(source.names()):
            if not name.endswith(UNUSED_SUFFIXES):
                yield name, source.read(name)


def _of_megatron(
    folder: Path, args: argparse.Namespace, other: HFFolder, world: World
) -> Iterator[tuple[str, torch.Tensor]]:
    """A Megatron folder's tensors as its export has them; what `other` leaves out or repeats rightly is left out."""
    source = open_megatron(folder, args.hf_config)
    head: HeadKind = "policy" if source.head == "policy_value" and not has_value_head(other) else source.head
    chunks = load_from_megatron(source, source.dtype, world)
    buckets = iter_hf_buckets(chunks, source.hf_config, world.groups, BUCKET_BYTES, head=head)
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
