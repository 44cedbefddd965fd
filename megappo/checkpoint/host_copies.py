"""Copies of tensors in host memory that is kept for the next save, and pinned where they come from a GPU."""

import torch

from megappo.runtime import platform

BLOCK_BYTES = 2**28
ALIGNMENT = 64


class HostCopies:
    """Makes the copies of one save after the other, each in the memory of the last copy of its name: fresh memory takes
    longer to be mapped than to be filled.

    Memory is cut out of blocks whose sizes are powers of two: torch's allocator of pinned memory rounds each allocation
    up to one.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._rests: list[torch.Tensor] = []

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy on the host, in place of the last one of this name."""
        if name not in self._kept:
            self._kept[name] = self._cut(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return self._kept[name].copy_(tensor.detach())

    def _cut(self, nbytes: int) -> torch.Tensor:
        """So many bytes, a storage of their own: of a view, torch.save writes all that it is a view of."""
        taken = -(-nbytes // ALIGNMENT) * ALIGNMENT
        number = next((i for i, rest in enumerate(self._rests) if len(rest) >= taken), len(self._rests))
        if number == len(self._rests):
            size = 1 << (max(taken, BLOCK_BYTES) - 1).bit_length()  # the next power of two
            self._rests.append(torch.empty(size, dtype=torch.uint8, pin_memory=platform.has_cuda()))
        rest = self._rests[number]
        self._rests[number] = rest[taken:]
        return torch.from_numpy(rest.numpy()[:nbytes])
