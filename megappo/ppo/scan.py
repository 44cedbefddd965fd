"""Linear recurrences over tokens as matrix products, in place of a Python loop over tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch.nn.functional import pad

BLOCK = 32
"""Tokens in a block. Fewer cost more operations per token outside of the products, more cost more inside."""
MASKED_BLOCK = 16
"""The same in `sums_behind`, where powers of the decay within a block also lose digits, the more the longer it is."""
SMALLEST_MASKED_DECAY = 0.7
"""With which `sums_behind` keeps 6 digits."""
MASKED_TOKENS = 1024
"""Which it takes at most: to this power the smallest decay is 1e-159, well within float64's range."""


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


def sums_behind(
    x: torch.Tensor, mask: torch.Tensor, decays: torch.Tensor, behind: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Discounted sums of what is behind each token, where tokens with mask 0 do not count.

    y[t] for a t with mask 1 is the sum over tokens s > t with mask 1 of decay ** (how many of these t..s-1 has) * x[s].
    Within a block of tokens this is a product with a triangle of ones, of x times decay ** (how many came before it).
    What blocks hand to those before them is the same product over blocks, in float64.

    Args:
        x: [rows, num_tokens] float32, which is overwritten; at most MASKED_TOKENS.
        mask: its like, of 0 and 1.
        decays: [rows] float64, none below SMALLEST_MASKED_DECAY.
        behind: [rows] float64, what y would be continued by: x at one more token behind all, and all after it.

    Returns:
        y, and `behind` for the tokens before these.
    """
    rows, num_tokens = x.shape
    padding = -num_tokens % MASKED_BLOCK
    if padding:
        x, mask = pad(x, (0, padding)), pad(mask, (0, padding))
    logs = decays.log2()[:, None]
    blocks, mask = x.view(-1, MASKED_BLOCK), mask.view(-1, MASKED_BLOCK)
    earlier = _before(MASKED_BLOCK, x.dtype, x.device)
    counts = mask @ earlier
    lengths = (counts[:, -1] + mask[:, -1]).double().view(rows, -1)
    powers = counts.view(rows, -1).mul_(logs.float()).exp2_().view(-1, MASKED_BLOCK)
    blocks.mul_(powers).mul_(mask)
    sums = blocks @ earlier.T
    totals = (sums[:, 0] + blocks[:, 0]).double().view(rows, -1)
    totals = torch.cat((totals, behind[:, None]), dim=1)
    earlier_blocks = _before(totals.shape[1], totals.dtype, totals.device)
    powers_of_blocks = (lengths @ earlier_blocks[:-1]).mul_(logs).exp2_()
    totals.mul_(powers_of_blocks)
    carried = (totals @ earlier_blocks.T).div_(powers_of_blocks)
    sums.add_(carried[:, :-1].float().view(-1, 1)).div_(powers)
    return sums.view(rows, -1)[:, :num_tokens], totals.sum(dim=1)


@cache
def _before(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[s, t]: 1 where s < t."""
    return torch.ones(size, size, dtype=dtype, device=device).triu(1)


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
