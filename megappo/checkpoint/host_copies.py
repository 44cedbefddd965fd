"""Copies of tensors in host memory that is kept for the next ones, and pinned where they come from a GPU."""

from collections import defaultdict
from collections.abc import Iterable

import torch

from megappo.runtime import platform

BLOCK_BYTES = 2**28
ALIGNMENT = 64


class HostCopies:
    """Makes copies, in memory of those that were given back: fresh memory takes longer to be mapped than to be
    filled.

    New memory is cut out of blocks whose sizes are powers of two: torch's allocator of pinned memory rounds each
    allocation up to one.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._rests: list[torch.Tensor] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the host, for `give_back` when nobody reads it any more."""
        free = self._free[tensor.shape, tensor.dtype]
        memory = free.pop() if free else self._cut(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return memory.copy_(tensor.detach())

    def give_back(self, copies: Iterable[torch.Tensor]) -> None:
        """Let the next copies overwrite these; any thread may."""
        for copy in copies:
            self._free[copy.shape, copy.dtype].append(copy)

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
