"""Shared memory, from which an engine on a CPU reads buckets of weights."""

import torch
import torch.multiprocessing


class SharedMemory:
    """Two buffers that take turns, kept from sync to sync: new pages cost more time than the copy into them."""

    def __init__(self) -> None:
        # torch's default passes descriptors, which an unrelated process cannot take.
        torch.multiprocessing.set_sharing_strategy("file_system")
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2

    def buffer(self, size: int) -> torch.Tensor:
        """Return uint8 [size] for a bucket; at most two are in use at a time."""
        self._buffers.reverse()
        if len(self._buffers[0]) < size:
            self._buffers[0] = shared_bytes(size)
        return self._buffers[0][:size]


def shared_bytes(size: int) -> torch.Tensor:
    """Return uint8 [size], in shared memory from the start: sharing it later would copy it.

    Raises:
        MemoryError: /dev/shm is too small.
    """
    try:
        storage = torch.UntypedStorage._new_using_filename_cpu(size)
    except RuntimeError as error:
        if "unable to allocate shared memory" not in str(error):
            raise
        raise MemoryError(
            f"no room for {size / 2**30:.2f} GiB of weights in shared memory, from which an engine on the CPU takes "
            "them: enlarge /dev/shm to two rollout.sync.bucket_bytes (docker run --shm-size=...), or set "
            f"rollout.sync.transport to broadcast ({error})"
        ) from error
    return torch.empty(0, dtype=torch.uint8).set_(storage)
