"""The actor's shards in shared memory, from which engines on a CPU copy what they need: nothing is gathered."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megappo.batch.exchange import Exchange
from megappo.sync.shared_memory import SharedMemory
from megappo.weights.buckets import TensorSpec
from megappo.weights.export import Export, Part

Place = tuple[str, tuple[int, ...]]
"""Of a part: the tensor's name, and where in that it begins."""


@dataclass(frozen=True)
class Listing:
    """Where the ranks have their parts of the tensors, for the engine of one of them.

    Attributes:
        generation: another one as soon as anything has moved, on any rank.
        parts: of each rank that is needed for all of the model, by place: what opens it.
    """

    generation: str
    tensors: Sequence[TensorSpec]
    parts: Sequence[Mapping[Place, tuple]]

    def as_json(self) -> dict[str, Any]:
        """What an engine reads: of replicas, the first.

        Returns:
            "tensors": name -> [shape, dtype]; "storages": [handle, and what opens it]; "parts": [name, number among the
            storages, dtype, offset, shape, stride, start].
        """
        found = {place: part for of_rank in reversed(self.parts) for place, part in of_rank.items()}
        storages = list(dict.fromkeys(storage for storage, *_ in found.values()))
        numbers = {storage: number for number, storage in enumerate(storages)}
        return {
            "tensors": {tensor.name: [tensor.shape, _name(tensor.dtype)] for tensor in self.tensors},
            "storages": [[storage[1], *storage] for storage in storages],
            "parts": [[name, numbers[storage], *rest, start] for (name, start), (storage, *rest) in found.items()],
        }


class Shards:
    """This rank's shards, on all ranks of the run.

    Args:
        export: None where the rank has none that are needed.
        tensors: the whole model's.
    """

    def __init__(self, export: Export | None, tensors: Sequence[TensorSpec], exchange: Exchange):
        self.export = export
        self.tensors = tensors
        self.exchange = exchange
        self._memory = SharedMemory()
        self._listing = Listing("", tensors, [])

    def listing(self) -> Listing:
        """Where all shards are now: all ranks together. On return no rank changes them any more."""
        generation = _digest(self.exchange.share(_digest(self._handles())))
        if generation != self._listing.generation:
            parts = self.exchange.share(self._described())
            self._listing = Listing(generation, self.tensors, [parts[rank] for rank in self._near()])
        return self._listing

    def parts(self) -> Iterator[Part]:
        """This rank's."""
        return iter(()) if self.export is None else self.export.parts()

    def _near(self) -> list[int]:
        """The ranks that have all of the model, without further replicas; this one first."""
        here = self.exchange.rank
        found = () if self.export is None else self.export.groups.layout.gathering({here})
        return sorted(found, key=lambda rank: abs(rank - here))

    def _handles(self) -> list[tuple]:
        """Where this rank's memory is, which is moved to where engines can read it if it is not there."""
        memory = [] if self.export is None else self.export.memory
        self._memory.move(memory)
        return [(tensor.untyped_storage()._share_filename_cpu_(), tensor.storage_offset()) for tensor in memory]

    def _described(self) -> dict[Place, tuple]:
        return {(part.name, part.start): _describe(part) for part in self.parts()}


def _describe(part: Part) -> tuple:
    tensor = part.tensor
    manager, handle, size = tensor.untyped_storage()._share_filename_cpu_()
    layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return (manager.decode(), handle.decode(), size), _name(tensor.dtype), *layout


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
