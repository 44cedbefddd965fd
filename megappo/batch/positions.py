"""Positions in flat tensors of rows laid end to end, and those that each rank of context parallelism holds.

Context parallelism cuts a sequence into 2 x size equal chunks and gives a rank one from either end: so all ranks attend
to as many tokens, though early ones attend to few and late ones to many.

Source: TransformerEngine's context parallelism of "thd" batches, which Megatron's rotary embedding follows.
"""

import torch
from torch import Tensor


def positions_in(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the positions, [T] int64, in spans that begin at `starts`, one span after the other; [b] int64 both."""
    here = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) + (starts - here).repeat_interleave(lengths)


def taken(flat: Tensor, lengths: Tensor, index: Tensor) -> Tensor:
    """Take the spans at `index`, in this order, from spans laid end to end."""
    starts = lengths.cumsum(0) - lengths
    return flat[positions_in(starts[index], lengths[index])]


def chunk_numbers(size: int, rank: int) -> tuple[int, ...]:
    """Return the chunks of each sequence that a rank holds; without context parallelism a sequence is one chunk."""
    return (rank, 2 * size - 1 - rank) if size > 1 else (0,)


def granularity(size: int) -> int:
    """Return the number of chunks of a sequence, by which its length must divide."""
    return size * len(chunk_numbers(size, 0))


def held_positions(cu_seqlens: Tensor, size: int, rank: int) -> Tensor:
    """Return the positions, [T / size] int64, in the whole pack of the tokens that a rank holds, in its order.

    Args:
        cu_seqlens: [b + 1] boundaries of the whole sequences, all multiples of `granularity(size)`.
    """
    numbers = torch.tensor(chunk_numbers(size, rank), device=cu_seqlens.device)
    chunks = cu_seqlens.diff().long() // granularity(size)
    starts = (cu_seqlens[:-1, None] + numbers * chunks[:, None]).flatten()
    return positions_in(starts, chunks.repeat_interleave(len(numbers)))


def positions_within(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return the position, [T] int64, of each token of the whole pack in its own sequence.

    Args:
        cu_seqlens: as in `held_positions`, int64.
        num_tokens: T, its last element, which the host would wait for a GPU to read.
    """
    numbers = torch.arange(num_tokens, device=cu_seqlens.device)
    return numbers - cu_seqlens[torch.searchsorted(cu_seqlens, numbers, right=True) - 1]
