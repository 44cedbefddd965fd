"""Positions in flat tensors, and who holds which token under context parallelism, against plain loops."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.batch.packing import granularity, held_positions
from megappo.batch.rows import positions_in, taken


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9))))
def test_positions_are_those_of_the_spans_one_after_the_other(spans):
    starts, lengths = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2).unbind(1)
    expected = [position for start, length in spans for position in range(start, start + length)]
    assert positions_in(starts, lengths).tolist() == expected


@given(st.lists(st.lists(st.integers(), max_size=5).map(tuple), min_size=1), st.data())
def test_spans_are_taken_in_the_order_of_the_index(spans, data):
    flat = torch.tensor([number % 1000 for span in spans for number in span], dtype=torch.int64)
    index = data.draw(st.lists(st.integers(0, len(spans) - 1)))
    expected = [number % 1000 for i in index for number in spans[i]]
    lengths = torch.tensor([len(span) for span in spans])
    assert taken(flat, lengths, torch.tensor(index, dtype=torch.int64)).tolist() == expected


def by_hand(lengths: list[int], size: int, rank: int) -> list[int]:
    """From each sequence the rank-th chunk of 2 x size from the front, then the rank-th from the back."""
    held, start = [], 0
    for length in lengths:
        chunks = [
            list(range(start + i * length // (2 * size), start + (i + 1) * length // (2 * size)))
            for i in range(2 * size)
        ]
        held += chunks[rank] + chunks[-1 - rank]
        start += length
    return held


@settings(max_examples=200, deadline=None)
@given(size=st.integers(2, 5), chunks=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_a_rank_holds_a_chunk_from_either_end_of_each_sequence(size: int, chunks: list[int]) -> None:
    assert granularity(size) == 2 * size
    lengths = [2 * size * chunk for chunk in chunks]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    held = [held_positions(bounds, size, rank) for rank in range(size)]
    assert [part.tolist() for part in held] == [by_hand(lengths, size, rank) for rank in range(size)]
    assert sorted(torch.cat(held).tolist()) == list(range(sum(lengths))), "every token is held once"
    assert len({len(part) for part in held}) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5))
def test_a_rank_alone_holds_everything_in_order(lengths: list[int]) -> None:
    assert granularity(1) == 1
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    assert held_positions(bounds, 1, 0).tolist() == list(range(sum(lengths)))
