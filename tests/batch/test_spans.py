"""Spans of flat tensors against plain loops."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.batch.spans import positions_in, taken


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9))))
def test_positions_are_those_of_the_spans_one_after_the_other(spans):
    starts, lengths = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2).unbind(1)
    expected = [position for start, length in spans for position in range(start, start + length)]
    assert positions_in(starts, lengths).tolist() == expected


@given(st.lists(st.lists(st.integers(), max_size=5).map(tuple), min_size=1), st.data())
def test_spans_are_taken_in_the_order_that_is_asked_for(spans, data):
    flat = torch.tensor([number % 1000 for span in spans for number in span], dtype=torch.int64)
    index = data.draw(st.lists(st.integers(0, len(spans) - 1)))
    expected = [number % 1000 for i in index for number in spans[i]]
    lengths = torch.tensor([len(span) for span in spans])
    assert taken(flat, lengths, torch.tensor(index, dtype=torch.int64)).tolist() == expected
