"""Shared memory, in which an engine on a CPU reads weights: buckets, and the model itself."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.multiprocessing


class SharedMemory:
    """Two buffers, kept from sync to sync: fresh pages cost more time than the copy into them; and the model's memory,
    moved here the first time."""

    def __init__(self) -> None:
        # torch's default passes descriptors, which an unrelated process cannot take.
        torch.multiprocessing.set_sharing_strategy("file_system")
        self._buffers: list[torch.Tensor] = []

    def buffer(self, size: int) -> torch.Tensor:
        """uint8 [size], to gather a bucket into. At most two are in use at a time."""
        if len(self._buffers) < 2:
            self._buffers.insert(0, shared_bytes(size))
        else:
            self._buffers.reverse()
        if len(self._buffers[0]) < size:
            self._buffers[0] = shared_bytes(size)
        return self._buffers[0][:size]

    def move(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have tensors of the model's here, while nothing else uses them."""
        with _room(sum(tensor.nbytes for tensor in tensors)):
            for tensor in tensors:
                tensor.share_memory_()  # moves it, and all that lies in the same storage, the first time


def shared_bytes(size: int) -> torch.Tensor:
    """uint8 [size], in shared memory from the start: sharing it later would copy it."""
    with _room(size):
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_using_filename_cpu(size))


@contextlib.contextmanager
def _room(num_bytes: int) -> Iterator[None]:
    """Say what to do when there is no room for so much in shared memory."""
    try:
        yield
    except RuntimeError as error:
        if "unable to allocate shared memory" not in str(error):
            raise
        raise MemoryError(
            f"no room for {num_bytes / 2**30:.2f} GiB of weights in shared memory, from which an engine on the CPU "
            "takes them: enlarge /dev/shm to the actor's size and two rollout.sync.bucket_bytes (docker run "
            f"--shm-size=...), or set rollout.sync.transport to broadcast ({error})"
        ) from error
