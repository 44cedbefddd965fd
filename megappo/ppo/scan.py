"""Linear recurrences over tokens as matrix products, in place of a Python loop over tokens."""

import torch

BLOCK = 16
"""Tokens in a block: the smallest with which the matrix products, not their overhead, take the time."""


class DiscountedSums:
    """y[t] = x[t] + decay * y[t + 1] along each row, y after the last token = 0.

    Within a block of tokens this is a product with a triangle of powers of decay. What a block hands to the one before
    it, its first y, follows the same recurrence over blocks with decay ** BLOCK, so it is computed the same way.

    Args:
        decay: float64, 0-dim, or [rows] for a decay of each row's own.
        num_tokens: length of the rows.
    Source: Blelloch 1990 (Prefix sums and their applications), section 1.4: first-order recurrences as scans.
    """

    def __init__(self, decay: torch.Tensor, num_tokens: int):
        self.block = num_tokens if num_tokens <= 2 * BLOCK else BLOCK
        self.num_blocks = -(-num_tokens // self.block) if num_tokens else 0
        self.decay = decay[..., None]
        self.triangle = _triangle(decay, self.block)
        self.over_blocks = DiscountedSums(decay**self.block, self.num_blocks) if self.num_blocks > 1 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """y, [rows, num_tokens] float64.

        The products are taken in float64: TF32, bfloat16 matmuls and autocast, where they are on, round those of
        float32 to three digits.
        """
        rows, num_tokens = x.shape
        blocks = x.new_empty(rows, self.num_blocks, self.block, dtype=torch.float64)
        padded = blocks.view(rows, self.num_blocks * self.block)
        padded[:, :num_tokens] = x
        padded[:, num_tokens:] = 0.0
        if self.over_blocks is not None:
            firsts = self.over_blocks((blocks @ self.triangle[..., :1]).squeeze(-1))
            blocks[:, :-1, -1] += self.decay * firsts[:, 1:]
        return (blocks @ self.triangle).view_as(padded)[:, :num_tokens]


def _triangle(decay: torch.Tensor, size: int) -> torch.Tensor:
    """[(rows,) s, t]: the weight decay ** (s - t) of x[s] in y[t], 0 where s < t."""
    offsets = torch.arange(size, device=decay.device)
    powers = decay[..., None] ** offsets
    return powers[..., (offsets[:, None] - offsets).clamp(min=0)].tril()
