"""A model's tensors that sleep in the host's memory while no phase needs them on the device.

By storage, not by tensor: parameters, main parameters and optimizer states are views of each other's memory, in ways
that depend on dtype and optimizer, and so nothing has to be pointed anew. On a GPU a storage that sleeps has size 0,
and its content lies in pinned host memory. On a CPU it keeps its size, since an engine may share it, and holds NaN:
what uses it all the same shows.

The copies of one kind share an `Arena`. torch's allocator of pinned memory rounds each allocation up to a power of two
(torch 2.14.1, ATen/core/CachingHostAllocator.h), so that copies of their own would take up to twice their bytes.
"""

from collections.abc import Collection, Iterator

import torch

from megappo import platform
from megappo.config.kinds import TensorKind
from megappo.models.train_engine import MegatronEngine, TrainedEngine
from megappo.placement.uses import Use

NAN_BYTE = 255  # NaN in every floating dtype
SMALLEST_PIECE = 2**20
"""Bytes: what the rounding of an arena wastes at most."""


class Offload:
    """The tensors of one model on this rank, of which some kinds sleep whenever they are not needed.

    Args:
        kinds: those; the others always stay.
    Attributes:
        asleep: the kinds that sleep now.
    """

    def __init__(self, engine: MegatronEngine, kinds: Collection[TensorKind]):
        self._engine = engine
        self._kinds = tuple(kinds)
        self._memories: dict[TensorKind, list[_Memory]] = {}
        self._arenas: dict[TensorKind, Arena] = {}
        self.asleep: set[TensorKind] = set()
        self._saved: set[TensorKind] = {"gradients"}  # every optimizer step begins by making them 0

    @property
    def host_bytes(self) -> int:
        """Of the copies on the host, which are kept for the next time."""
        return sum(arena.nbytes for arena in self._arenas.values())

    def rest(self, use: Use) -> None:
        """Put to sleep what is not needed."""
        unneeded = [kind for kind in self._kinds if kind not in use and kind not in self.asleep]
        found = _storages(self._engine) if unneeded else {}
        for kind in unneeded:
            known = [memory.storage._cdata for memory in self._memories.get(kind, ())]
            if known != [storage._cdata for storage in found[kind]]:
                self._memories[kind] = [_Memory(storage) for storage in found[kind]]
                if kind != "gradients":
                    self._saved.discard(kind)
                    self._arenas.pop(kind, None)  # before the new one, which may take its memory
                    self._arenas[kind] = arena = Arena(sum(memory.size for memory in self._memories[kind]))
                    for memory in self._memories[kind]:
                        memory.copy = arena.take(memory.size)
            for memory in self._memories[kind]:
                memory.sleep(save=kind not in self._saved)
            self._saved.add(kind)
            self.asleep.add(kind)

    def wake(self, use: Use) -> None:
        """Bring back what is needed."""
        for kind in self.asleep & use.keys():
            self.asleep.remove(kind)
            for memory in self._memories[kind]:
                memory.wake()
        self._saved -= {kind for kind, changes in use.items() if changes and kind != "gradients"}


class Arena:
    """Host memory of a fixed size, pinned on a GPU, in pieces whose sizes are powers of two.

    Args:
        nbytes: that `take` may give in all.
    Attributes:
        nbytes: of all pieces: the same, rounded up to a multiple of SMALLEST_PIECE.
    """

    def __init__(self, nbytes: int):
        self._pieces = [
            torch.empty(size, dtype=torch.uint8, pin_memory=platform.has_cuda()) for size in piece_sizes(nbytes)
        ]
        self.nbytes = sum(map(len, self._pieces))
        self._free = iter(self._pieces)
        self._piece = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> list[torch.Tensor]:
        """The next so many bytes, in order: parts of one or several pieces."""
        parts: list[torch.Tensor] = []
        while nbytes:
            if not len(self._piece):
                self._piece = next(self._free)
            part, self._piece = self._piece[:nbytes], self._piece[nbytes:]
            parts.append(part)
            nbytes -= len(part)
        return parts


def piece_sizes(nbytes: int) -> list[int]:
    """Powers of two, the largest first, that add up to so many bytes, rounded up to a multiple of SMALLEST_PIECE."""
    rounded = -(-nbytes // SMALLEST_PIECE) * SMALLEST_PIECE
    return [1 << bit for bit in reversed(range(rounded.bit_length())) if rounded >> bit & 1]


class _Memory:
    """A storage, and what it held when it was last saved, in parts; no parts where that need not be kept."""

    def __init__(self, storage: torch.UntypedStorage):
        self.storage = storage
        self.size = storage.nbytes()
        self.copy: list[torch.Tensor] = []

    def sleep(self, *, save: bool) -> None:
        if save:
            for kept, bytes_here in self._parts():
                kept.copy_(bytes_here, non_blocking=True)
        if platform.has_cuda():
            self.storage.resize_(0)
        else:
            self.storage.fill_(NAN_BYTE)

    def wake(self) -> None:
        if platform.has_cuda():
            self.storage.resize_(self.size)
        for kept, bytes_here in self._parts():
            bytes_here.copy_(kept, non_blocking=True)

    def _parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each part of the copy, and the bytes of the storage that it is of."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        return zip(self.copy, whole.split([len(part) for part in self.copy]) if self.copy else (), strict=True)


def _storages(engine: MegatronEngine) -> dict[TensorKind, list[torch.UntypedStorage]]:
    """Each storage once; one that serves several kinds under the first of them."""
    found: dict[TensorKind, list[torch.UntypedStorage]] = {}
    seen: set[int] = set()
    for kind, tensors in (("weights", _weights), ("gradients", _gradients), ("optimizer", _optimizer)):
        found[kind] = []
        for tensor in tensors(engine):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen and storage.nbytes() and tensor.device == platform.device():
                seen.add(storage._cdata)
                found[kind].append(storage)
    return found


def _weights(engine: MegatronEngine) -> Iterator[torch.Tensor]:
    for chunk in engine.chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()


def _gradients(engine: MegatronEngine) -> Iterator[torch.Tensor]:
    for runner in engine.runners if isinstance(engine, TrainedEngine) else ():
        yield from (buffer.grad_data for buffer in runner.buffers + runner.expert_parallel_buffers)


def _optimizer(engine: MegatronEngine) -> Iterator[torch.Tensor]:
    for part in engine.optimizer.chained_optimizers if isinstance(engine, TrainedEngine) else ():
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            # Step counters stay: there may be thousands, of four bytes.
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())
