"""Copies of tensors in host memory that is kept for the next ones."""

from collections import defaultdict
from collections.abc import Iterable

import torch


class HostCopies:
    """Makes copies, in memory of those that were given back: fresh memory takes longer to be mapped than to be
    filled."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the host, for `give_back` when nobody reads it any more."""
        free = self._free[tensor.shape, tensor.dtype]
        memory = free.pop() if free else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return memory.copy_(tensor.detach())

    def give_back(self, copies: Iterable[torch.Tensor]) -> None:
        """Let the next copies overwrite these; any thread may."""
        for copy in copies:
            self._free[copy.shape, copy.dtype].append(copy)
