"""Which tokens of a packed batch each rank of context parallelism holds.

A sequence is cut into 2 x size equal chunks, and a rank takes one from either end: so all ranks attend to as many
tokens, though early ones see little and late ones much.

Source: TransformerEngine's context parallelism of "thd" batches, which Megatron's rotary embedding follows.
"""

import torch

from megappo.batch.spans import positions_in


def chunk_numbers(size: int, rank: int) -> tuple[int, ...]:
    """The chunks of each sequence that a rank holds; without context parallelism a sequence is one chunk."""
    return (rank, 2 * size - 1 - rank) if size > 1 else (0,)


def granularity(size: int) -> int:
    """What the length of every sequence must divide by: its number of chunks."""
    return size * len(chunk_numbers(size, 0))


def held_positions(cu_seqlens: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """[T / size] int64: positions in the whole pack of the tokens that a rank holds, in the order in which it does.

    Args:
        cu_seqlens: [b + 1] boundaries of the whole sequences, all multiples of `granularity(size)`.
    """
    numbers = torch.tensor(chunk_numbers(size, rank), device=cu_seqlens.device)
    chunks = cu_seqlens.diff().long() // granularity(size)
    starts = (cu_seqlens[:-1, None] + numbers * chunks[:, None]).flatten()
    lengths = chunks.repeat_interleave(len(numbers))
    return positions_in(starts, lengths)


def positions_within(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[T] int64: the position of each token of the whole pack in its own sequence.

    Args:
        cu_seqlens: as of `held_positions`, int64. num_tokens: T, its last, which a GPU would have to be waited for.
    """
    numbers = torch.arange(num_tokens, device=cu_seqlens.device)
    return numbers - cu_seqlens[torch.searchsorted(cu_seqlens, numbers, right=True) - 1]
