"""A model's tensors that sleep in the host's memory while no phase needs them on the device.

Storages sleep, not tensors: parameters, main parameters and optimizer states are views of each other's memory, in ways
that depend on dtype and optimizer, and all views stay valid. On a GPU a storage that sleeps has size 0, and its content
lies in pinned host memory. On a CPU it keeps its size and holds NaN, so that tests see any use of it.

The copies of one kind share their memory (`host_copies`). torch's allocator of pinned memory rounds each allocation up
to a power of two (torch 2.14.1, ATen/core/CachingHostAllocator.h), so that copies of their own would take up to twice
their bytes.
"""

from collections.abc import Collection, Iterator, Sequence

import torch

from megappo.config.values import TensorKind
from megappo.models.megatron_engine import MegatronEngine
from megappo.models.train_engine import TrainedEngine
from megappo.placement.components import DeviceUse
from megappo.runtime import platform

NAN_BYTE = 255  # NaN in every floating dtype
SMALLEST_BLOCK = 2**20
"""Bytes; at most this much of a kind's copies is wasted."""


class Offload:
    """The tensors of one model on this rank, of which some kinds sleep whenever they are not needed.

    Args:
        kinds: the kinds that may sleep; the others always stay.
    Attributes:
        asleep: the kinds that sleep now.
    """

    def __init__(self, engine: MegatronEngine, kinds: Collection[TensorKind]):
        self._engine = engine
        self._kinds = tuple(kinds)
        self._memories: dict[TensorKind, list[_Memory]] = {}
        self.asleep: set[TensorKind] = set()
        self._saved: set[TensorKind] = {"gradients"}  # every optimizer step begins by making them 0

    @property
    def host_bytes(self) -> int:
        """Bytes of the copies on the host, which are kept for the next time."""
        return sum(len(part) for kind in self._memories.values() for memory in kind for part in memory.copy)

    def rest(self, use: DeviceUse) -> None:
        """Put the kinds to sleep that are not needed."""
        unneeded = [kind for kind in self._kinds if kind not in use and kind not in self.asleep]
        if not unneeded:
            return
        found = _storages(self._engine)
        for kind in unneeded:
            known = [memory.storage._cdata for memory in self._memories.get(kind, ())]
            if known != [storage._cdata for storage in found[kind]]:
                self._make_copies(kind, found[kind])
            for memory in self._memories[kind]:
                memory.sleep(save=kind not in self._saved)
            self._saved.add(kind)
            self.asleep.add(kind)

    def _make_copies(self, kind: TensorKind, storages: list[torch.UntypedStorage]) -> None:
        self._memories.pop(kind, None)  # first: the new copies may take its memory
        if kind != "gradients":
            self._saved.discard(kind)
        copies = host_copies([0 if kind in self._saved else storage.nbytes() for storage in storages])
        self._memories[kind] = [_Memory(storage, copy) for storage, copy in zip(storages, copies, strict=True)]

    def wake(self, use: DeviceUse) -> None:
        """Bring back the kinds that are needed."""
        for kind in self.asleep & use.keys():
            self.asleep.remove(kind)
            for memory in self._memories[kind]:
                memory.wake()
        self._saved -= {kind for kind, changes in use.items() if changes and kind != "gradients"}


def host_copies(sizes: Sequence[int]) -> list[list[torch.Tensor]]:
    """Host memory for storages of these bytes, pinned on a GPU: for each one or several parts, in order."""
    pinned = platform.has_cuda()
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in block_sizes(sum(sizes))]
    copies = []
    for size in sizes:
        parts = []
        while size:
            part, rest = blocks[0][:size], blocks[0][size:]
            parts.append(part)
            size -= len(part)
            blocks[:1] = [rest] if len(rest) else []
        copies.append(parts)
    return copies


def block_sizes(nbytes: int) -> list[int]:
    """Powers of two, the largest first, that add up to so many bytes, rounded up to a multiple of SMALLEST_BLOCK."""
    rounded = -(-nbytes // SMALLEST_BLOCK) * SMALLEST_BLOCK
    return [1 << bit for bit in reversed(range(rounded.bit_length())) if rounded >> bit & 1]


class _Memory:
    """A storage, and its content when it was last saved, in parts; no parts where that need not be kept."""

    def __init__(self, storage: torch.UntypedStorage, copy: list[torch.Tensor]):
        self.storage, self.copy = storage, copy
        self.size = storage.nbytes()

    def sleep(self, *, save: bool) -> None:
        if save:
            for kept, content in self._parts():
                kept.copy_(content, non_blocking=True)
        if platform.has_cuda():
            self.storage.resize_(0)
        else:
            self.storage.fill_(NAN_BYTE)

    def wake(self) -> None:
        if platform.has_cuda():
            self.storage.resize_(self.size)
        for kept, content in self._parts():
            content.copy_(kept, non_blocking=True)

    def _parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each part of the copy, and its bytes in the storage."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        start = 0
        for kept in self.copy:
            yield kept, whole[start : start + len(kept)]
            start += len(kept)


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
