"""Memory of the host for tensors, pinned where tensors come from a GPU."""

import torch
from torch import Tensor

from megappo.runtime import platform

BLOCK_BYTES = 2**28
ALIGNMENT = 64
"""Bytes."""


class HostMemory:
    """Gives out memory cut from blocks whose sizes are powers of two: torch's allocator of pinned memory rounds each
    allocation up to one."""

    def __init__(self) -> None:
        self._rests: list[Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor with a storage of its own: of a view, torch.save would write the whole storage."""
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        taken = -(-nbytes // ALIGNMENT) * ALIGNMENT
        number = next((i for i, rest in enumerate(self._rests) if len(rest) >= taken), len(self._rests))
        if number == len(self._rests):
            size = 1 << (max(taken, BLOCK_BYTES) - 1).bit_length()  # the next power of two
            self._rests.append(torch.empty(size, dtype=torch.uint8, pin_memory=platform.has_cuda()))
        rest = self._rests[number]
        self._rests[number] = rest[taken:]
        return torch.from_numpy(rest.numpy()[:nbytes]).view(dtype).view(shape)
