"""Linear recurrences over tokens as matrix products, in place of a Python loop over tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.functional import pad

BLOCK = 32
"""Tokens in a block. Fewer cost more operations per token outside of the products, more cost more inside."""


class DiscountedSums:
    """y[t] = x[t] + decay * y[t + 1] along each row, y after the last token = 0.

    Within a block of tokens this is a product with a triangle of powers of decay. What a block hands to the one before
    it, its first y, follows the same recurrence over blocks with decay ** BLOCK, so it is computed the same way, in
    float64.

    Args:
        decay: float64, 0-dim, or [rows] for a decay of each row's own.
        num_tokens: length of the rows.
        dtype: in which the products within blocks are taken.
    Source: Blelloch 1990 (Prefix sums and their applications), section 1.4: first-order recurrences as scans.
    """

    def __init__(self, decay: torch.Tensor, num_tokens: int, dtype: torch.dtype = torch.float64):
        self.num_blocks = -(-num_tokens // BLOCK)
        self.decay = decay[..., None]
        self.triangle = _triangle(decay).to(dtype)
        self.first_column = self.triangle[..., :1].contiguous()
        self.over_blocks = DiscountedSums(decay**BLOCK, self.num_blocks) if self.num_blocks > 1 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """y, [rows, num_tokens], from x of the same shape, which it may overwrite."""
        rows, num_tokens = x.shape
        padding = self.num_blocks * BLOCK - num_tokens
        x = x.to(self.triangle.dtype)
        blocks = (pad(x, (0, padding)) if padding else x).view(rows, self.num_blocks, BLOCK)
        if self.over_blocks is not None:
            firsts = self.over_blocks((blocks @ self.first_column).squeeze(-1).double())
            blocks[:, :-1, -1] += (self.decay * firsts[:, 1:]).to(blocks.dtype)
        return (blocks @ self.triangle).view(rows, -1)[:, :num_tokens]


def _triangle(decay: torch.Tensor) -> torch.Tensor:
    """[(rows,) s, t]: the weight decay ** (s - t) of x[s] in y[t], 0 where s < t."""
    offsets = torch.arange(BLOCK, device=decay.device)
    powers = decay[..., None] ** offsets
    return powers[..., (offsets[:, None] - offsets).clamp(min=0)].tril()


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 tensors on the CPU are taken in float32, whatever precision has been asked of matmuls."""
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # oneDNN alone would round to bfloat16
    try:
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.backends.mkldnn.enabled = enabled
