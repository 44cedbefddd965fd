"""A model's tensors that sleep in the host's memory while no phase needs them on the device.

Storages sleep, not tensors: parameters, main parameters and optimizer states are views of each other's memory, in ways
that depend on dtype and optimizer, and all views stay valid. On a GPU a storage that sleeps has size 0, and its content
lies in pinned host memory. On a CPU it keeps its size and holds NaN, so that tests see any use of it.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, UntypedStorage

from megappo.config.values import TensorKind
from megappo.models.megatron_engine import MegatronEngine
from megappo.models.train_engine import TrainedEngine
from megappo.placement.components import DeviceUse
from megappo.runtime import platform

NAN_BYTE = 255  # NaN in every floating dtype


class Offload:
    """The tensors of one model on this rank, of which some kinds sleep whenever they are not needed.

    Args:
        kinds: the kinds that may sleep; the others always stay.
        base: the engine of the model whose weights this one uses: they sleep with that one.
    Attributes:
        asleep: the kinds that sleep now.
    """

    def __init__(
        self,
        engine: MegatronEngine | None,
        kinds: Collection[TensorKind],
        base: MegatronEngine | None = None,
    ):
        self._engine = engine
        self._base = base
        self._kinds = tuple(kinds)
        self._memories: dict[TensorKind, list[_Memory]] = {}
        self.asleep: set[TensorKind] = set()

    @property
    def host_bytes(self) -> int:
        """Bytes of the copies on the host, which are kept for the next time, and of optimizer states that stay."""
        staying = self._engine.host_bytes if isinstance(self._engine, TrainedEngine) else 0
        return staying + sum(len(part) for kind in self._memories.values() for memory in kind for part in memory.copy)

    def rest(self, use: DeviceUse) -> None:
        """Put the kinds to sleep that are not needed."""
        unneeded = [kind for kind in self._kinds if kind not in use and kind not in self.asleep]
        if not unneeded:
            return
        storages = _storages(self._engine, self._base)
        for kind in unneeded:
            known = [memory.storage._cdata for memory in self._memories.get(kind, ())]
            if known != [storage._cdata for storage in storages[kind]]:
                self._memories[kind] = []  # first: the new copies may take its memory
                # Gradients need no copy: every optimizer step begins by making them 0.
                self._memories[kind] = [_Memory(storage, kind != "gradients") for storage in storages[kind]]
            for memory in self._memories[kind]:
                memory.sleep()
            self.asleep.add(kind)

    def wake(self, use: DeviceUse) -> None:
        """Bring back the kinds that are needed."""
        for kind, changes in use.items():
            memories = self._memories.get(kind, [])
            if kind in self.asleep:
                self.asleep.remove(kind)
                for memory in memories:
                    memory.wake()
            for memory in memories:
                memory.is_saved = memory.is_saved and not changes


NO_OFFLOAD = Offload(None, ())
"""Offload of a model that is not on this rank."""


class _Memory:
    """A storage, and the copy of its content on the host.

    Attributes:
        copy: parts of the copy; none if the content need not be kept.
        is_saved: the copy equals the content now.
    """

    def __init__(self, storage: UntypedStorage, is_kept: bool):
        self.storage = storage
        self.size = storage.nbytes()
        sizes = block_sizes(self.size) if is_kept else []
        self.copy = [torch.empty(size, dtype=torch.uint8, pin_memory=platform.has_cuda()) for size in sizes]
        self.is_saved = False

    def sleep(self) -> None:
        if not self.is_saved:
            for kept, content in self._parts():
                kept.copy_(content, non_blocking=True)
        self.is_saved = True
        if platform.has_cuda():
            self.storage.resize_(0)
        else:
            self.storage.fill_(NAN_BYTE)

    def wake(self) -> None:
        if platform.has_cuda():
            self.storage.resize_(self.size)
        for kept, content in self._parts():
            content.copy_(kept, non_blocking=True)

    def _parts(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield each part of the copy, and its bytes in the storage."""
        if not self.copy:
            return ()
        content = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        return zip(self.copy, content.split([len(part) for part in self.copy]), strict=True)


def block_sizes(nbytes: int) -> list[int]:
    """Return the powers of two, the largest first, that add up to `nbytes`.

    torch's allocator of pinned memory rounds each allocation up to a power of two (torch 2.14.1,
    ATen/core/CachingHostAllocator.h), so that one block would take up to twice its bytes.
    """
    return [1 << bit for bit in reversed(range(nbytes.bit_length())) if nbytes >> bit & 1]


def _storages(engine: MegatronEngine, base: MegatronEngine | None) -> dict[TensorKind, list[UntypedStorage]]:
    """Return each storage on the device once, without the base's; a storage that serves several kinds is under the
    first."""
    seen = set()
    if base is not None:
        for tensor in _tensors(base)["weights"]:
            seen.add(tensor.untyped_storage()._cdata)
    by_kind: dict[TensorKind, list[UntypedStorage]] = {}
    for kind, tensors in _tensors(engine).items():
        by_kind[kind] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            is_here = tensor.device == platform.device() and storage.nbytes()
            if is_here and storage._cdata not in seen:
                by_kind[kind].append(storage)
                seen.add(storage._cdata)
    return by_kind


def _tensors(engine: MegatronEngine) -> dict[TensorKind, list[Tensor]]:
    weights = [tensor for chunk in engine.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    gradients: list[Tensor] = []
    states: list[Tensor] = []
    if isinstance(engine, TrainedEngine):
        for runner in engine.wrapped_chunks:
            gradients += [buffer.grad_data for buffer in runner.buffers + runner.expert_parallel_buffers]
        for part in engine.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                states += group["params"]
            for state in part.optimizer.state.values():
                # Step counters stay: there may be thousands, of four bytes.
                states += [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
    return {"weights": weights, "gradients": gradients, "optimizer": states}
