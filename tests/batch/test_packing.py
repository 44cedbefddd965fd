"""Packing against plain loops over tokens."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.batch.packing import PackedBatch, num_held, pack
from megappo.batch.rows import Rows

CPU = torch.device("cpu")
Lengths = list[tuple[int, int]]
LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6)


def make_rows(lengths: Lengths, width: int | None = None) -> Rows:
    """Rows whose tokens are all different and never 0; R = `width`, or without it no field sets R."""
    tokens, start = [], 1
    for prompt, response in lengths:
        tokens.append(torch.arange(start, start + prompt + response))
        start += prompt + response
    fields = {} if width is None else {"values": torch.zeros(len(lengths), width)}
    prompts, responses = torch.tensor(lengths).T
    return Rows(torch.arange(len(lengths)), torch.arange(len(lengths)), prompts, responses, torch.cat(tokens), fields)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, multiple=st.integers(1, 5))
def test_rows_lie_end_to_end(lengths: Lengths, multiple: int) -> None:
    rows = make_rows(lengths)
    packed = pack(rows, multiple, CPU)
    num_tokens = sum(prompt + response for prompt, response in lengths)
    padding = packed.input_ids.shape[1] - num_tokens
    assert packed.input_ids.shape == packed.position_ids.shape == (1, num_tokens + padding)
    assert 0 <= padding < multiple and (num_tokens + padding) % multiple == 0
    assert packed.input_ids[0].tolist() == [*range(1, num_tokens + 1), *[0] * padding]
    expected = [prompt + response for prompt, response in lengths] + ([padding] if padding else [])
    bounds = packed.cu_seqlens.tolist()
    assert [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)] == expected
    assert bounds[0] == 0 and packed.cu_seqlens.dtype == torch.int32
    assert num_held([sum(pair) for pair in lengths], multiple) == bounds[-1]
    assert packed.lengths == expected
    assert packed.input_ids[0, packed.last_token_index].tolist() == [int(tokens[-1]) for tokens in rows.sequences]
    assert packed.position_ids[0].tolist() == [position for length in expected for position in range(length)]


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, multiple=st.integers(1, 5))
def test_predictors_stand_one_before_each_response_token(lengths: Lengths, multiple: int) -> None:
    rows = make_rows(lengths)
    packed = pack(rows, multiple, CPU)
    responses = [
        token for tokens, (prompt, _) in zip(rows.sequences, lengths, strict=True) for token in tokens[prompt:].tolist()
    ]
    assert packed.targets.tolist() == responses
    assert packed.input_ids[0, packed.predictor_index].tolist() == [token - 1 for token in responses]


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, extra=st.none() | st.integers(0, 3))
def test_response_values_go_back_to_their_rows_with_their_gradients(lengths: Lengths, extra: int | None) -> None:
    longest = max(response for _, response in lengths)
    width = longest + (extra or 0)
    packed = pack(make_rows(lengths, None if extra is None else width), 4, CPU)
    flat = packed.targets.double().requires_grad_()
    padded = packed.responses(flat)
    expected = torch.zeros(len(lengths), width, dtype=torch.float64)
    start = 1
    for row, (prompt, response) in enumerate(lengths):
        expected[row, :response] = torch.arange(start + prompt, start + prompt + response)
        start += prompt + response
    assert torch.equal(padded, expected)
    weights = torch.arange(padded.numel()).view_as(padded) + 1.0
    (padded * weights).sum().backward()
    assert torch.equal(flat.grad, weights[expected > 0].double())


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 17)), min_size=1, max_size=6),
    multiple=st.integers(1, 3),
    context=st.integers(2, 4),
)
def test_every_token_is_predicted_by_one_of_the_ranks_that_share_the_rows_out(
    lengths: Lengths, multiple: int, context: int
) -> None:
    rows = make_rows(lengths)
    shares = [pack(rows, multiple, CPU, context=context, context_rank=rank) for rank in range(context)]
    assert len({tuple(share.cu_seqlens.tolist()) for share in shares}) == 1
    bounds = shares[0].cu_seqlens.tolist()
    padded = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    assert all(length % (2 * context) == 0 for length in padded) and shares[0].lengths == padded
    assert [-(-sum(pair) // (2 * context)) * 2 * context for pair in lengths] == padded[: len(lengths)]
    predicted, ended = torch.zeros(len(lengths), rows.max_response_length), torch.zeros(len(lengths))
    for share in shares:
        num_here = share.input_ids.shape[1]
        assert num_here * context == bounds[-1] and num_here % multiple == 0
        assert num_here == num_held([sum(pair) for pair in lengths], multiple, context=context)
        assert share.input_ids[0, share.predictor_index].tolist() == [token - 1 for token in share.targets.tolist()]
        predicted += share.responses(share.targets.float())
        ended += share.at_last_tokens(share.input_ids[0, share.last_token_index].float())
    assert ended.tolist() == [int(tokens[-1]) for tokens in rows.sequences]
    for row, (tokens, (prompt, response)) in enumerate(zip(rows.sequences, lengths, strict=True)):
        assert predicted[row, :response].tolist() == tokens[prompt:].tolist()
        assert not predicted[row, response:].any()
    held = [
        pair
        for share in shares
        for pair in zip(share.input_ids[0].tolist(), share.position_ids[0].tolist(), strict=True)
    ]
    expected = [(token, place) for tokens in rows.sequences for place, token in enumerate(tokens.tolist())]
    assert sorted(pair for pair in held if pair[0]) == expected, "each token once, at its place in its row"


def test_rows_in_another_order_are_packed_in_that_order() -> None:
    rows = make_rows([(2, 3), (1, 2), (3, 1)]).select([2, 0])
    packed: PackedBatch = pack(rows, 1, CPU)
    assert packed.input_ids.tolist() == [[9, 10, 11, 12, 1, 2, 3, 4, 5]]
    assert packed.responses(packed.targets.float()).tolist() == [[12, 0, 0], [3, 4, 5]]


def test_what_an_environment_wrote_is_read_and_not_predicted() -> None:
    rows = make_rows([(2, 4), (1, 2)])
    mask = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    packed = pack(replace(rows, fields={"response_mask": mask}), 1, CPU)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert packed.targets.tolist() == [3, 6, 9]
    assert packed.input_ids[0, packed.predictor_index].tolist() == [2, 5, 8]
    assert packed.input_ids[0, packed.last_token_index].tolist() == [6, 9]
    assert packed.responses(packed.targets.float()).tolist() == [[3, 0, 0, 6], [0, 9, 0, 0]]
