"""A model's tensors that sleep in the host's memory while no phase needs them on the device.

By storage, not by tensor: parameters, main parameters and optimizer states are views of each other's memory, in ways
that depend on dtype and optimizer, and so nothing has to be pointed anew. On a GPU a storage that sleeps has size 0,
and its content lies in pinned host memory. On a CPU it keeps its size, since an engine may share it, and holds NaN:
what uses it all the same shows.
"""

from collections.abc import Collection, Iterator

import torch

from megappo import platform
from megappo.config.kinds import TensorKind
from megappo.models.train_engine import MegatronEngine, TrainedEngine
from megappo.placement.uses import Use

NAN_BYTE = 255  # NaN in every floating dtype


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
        self.asleep: set[TensorKind] = set()
        self._saved: set[TensorKind] = {"gradients"}  # every optimizer step begins by making them 0

    @property
    def host_bytes(self) -> int:
        """Of the copies on the host, which are kept for the next time."""
        return sum(memory.copy.nbytes() for kind in self._memories.values() for memory in kind if memory.copy)

    def rest(self, use: Use) -> None:
        """Put to sleep what is not needed."""
        unneeded = [kind for kind in self._kinds if kind not in use and kind not in self.asleep]
        found = _storages(self._engine) if unneeded else {}
        for kind in unneeded:
            known = {memory.storage._cdata: memory for memory in self._memories.get(kind, ())}
            self._memories[kind] = [known.get(storage._cdata) or _Memory(storage) for storage in found[kind]]
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


class _Memory:
    """A storage, and what it held when it was last saved."""

    def __init__(self, storage: torch.UntypedStorage):
        self.storage = storage
        self.size = storage.nbytes()
        self.copy: torch.UntypedStorage | None = None

    def sleep(self, *, save: bool) -> None:
        if save:
            if self.copy is None:
                pinned = torch.empty(self.size, dtype=torch.uint8, pin_memory=platform.has_cuda())
                self.copy = pinned.untyped_storage()
            self.copy.copy_(self.storage, non_blocking=True)
        if platform.has_cuda():
            self.storage.resize_(0)
        else:
            self.storage.fill_(NAN_BYTE)

    def wake(self) -> None:
        if platform.has_cuda():
            self.storage.resize_(self.size)
        if self.copy is not None:
            self.storage.copy_(self.copy, non_blocking=True)


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
