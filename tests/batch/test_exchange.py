"""Moving rows between ranks, against a dictionary from row number to what that row holds."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from spawn import run_ranks

from megappo.batch.exchange import Batch, Exchange, RankRows, RowTable, output_sources, shard_destinations
from megappo.batch.fields import FIELDS, Field
from megappo.batch.rows import NO_TOKENS, Rows
from megappo.placement.layout import Layout

NUM_CASES = 60
FIELDS.register("ages", Field(per_token=False, writer="this test", meaning="a field from outside"))
FIELDS.register("marks", Field(per_token=False, writer="this test", meaning="three of each row", has_columns=True))
Oracle = dict[int, dict[str, torch.Tensor]]
"""Row number -> its tokens ("input_ids", unpadded) and fields (one value per response token)."""


@dataclass(frozen=True)
class Case:
    """Rows of some (prompt, response) lengths, each on one rank of `sources`, to go to any ranks of `destinations`.

    Attributes:
        prompt_ids: prompt_id of each row, rising.
    """

    lengths: tuple[tuple[int, int], ...]
    sources: RankRows
    destinations: RankRows
    prompt_ids: tuple[int, ...]


def oracle(lengths: tuple[tuple[int, int], ...]) -> Oracle:
    """Tokens and fields of each row; no two tokens or values of all rows are equal."""
    rows = {}
    for row, (prompt, response) in enumerate(lengths):
        tokens = torch.arange(prompt + response) + 1000 * row
        values = torch.arange(response) + 1.0 + 1000 * row
        rows[row] = {"input_ids": tokens, "values": values, "returns": -values, "advantages": values + 0.5}
    return rows


def rows_of(case: Case, held: tuple[int, ...], names: tuple[str, ...], width: int) -> Rows:
    """The rows a rank holds, in its order."""
    source = oracle(case.lengths)
    fields = {name: torch.zeros(len(held), width) for name in names}
    for name in names:
        for i, row in enumerate(held):
            fields[name][i, : case.lengths[row][1]] = source[row][name]
    prompts, responses = (torch.tensor([case.lengths[row][i] for row in held], dtype=torch.int64) for i in (0, 1))
    input_ids = torch.cat([source[row]["input_ids"] for row in held]) if held else NO_TOKENS
    prompt_ids = torch.tensor([case.prompt_ids[row] for row in held], dtype=torch.int64)
    ids = torch.tensor([10 * row - 7 for row in held], dtype=torch.int64)  # not numbered yet
    return Rows(ids, prompt_ids, prompts, responses, input_ids, fields)


def assert_rows(found: Rows, case: Case, held: tuple[int, ...], names: set[str]) -> None:
    """Exactly these rows, in this order, with their own tokens and values, and 0 after them."""
    source = oracle(case.lengths)
    width = max((response for _, response in case.lengths), default=0)
    assert found.ids.tolist() == list(held)
    assert found.prompt_ids.tolist() == [case.prompt_ids[row] for row in held]
    assert [tokens.tolist() for tokens in found.sequences] == [source[row]["input_ids"].tolist() for row in held]
    assert list(zip(found.prompt_lengths.tolist(), found.response_lengths.tolist(), strict=True)) == [
        case.lengths[row] for row in held
    ]
    assert found.fields.keys() == names
    for name in names:
        padded = [source[row][name].tolist() + [0.0] * (width - case.lengths[row][1]) for row in held]
        assert found.fields[name].shape == (len(held), width)
        assert found.fields[name].tolist() == padded, name


# --- moving rows ---


@st.composite
def generated_cases(draw: st.DrawFn, world_size: int) -> Case:
    """Ranks without rows, rows that go nowhere or everywhere, in any order; empty responses; no rows."""
    size = draw(st.integers(0, 7))
    lengths = tuple((draw(st.integers(1, 4)), draw(st.integers(0, 5))) for _ in range(size))
    of_row = [draw(st.integers(0, world_size - 1)) for _ in range(size)]
    order = draw(st.permutations(range(size)))
    sources = tuple(tuple(row for row in order if of_row[row] == rank) for rank in range(world_size))
    wanted = st.lists(st.sampled_from(range(size)), unique=True) if size else st.just([])
    destinations = tuple(tuple(draw(wanted)) for _ in range(world_size))
    return Case(lengths, sources, destinations, tuple(sorted(draw(st.integers(0, 9)) for _ in range(size))))


def generate(world_size: int) -> list[Case]:
    """Cases drawn here rather than on the ranks, which must all see the same ones."""
    cases: list[Case] = []

    @settings(max_examples=NUM_CASES, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(generated_cases(world_size))
    def collect(case: Case) -> None:
        cases.append(case)

    collect()
    return cases


def check_moves(rank: int, world_size: int, cases: list[Case]) -> None:
    exchange = Exchange(dist.group.WORLD)
    for case in cases:
        width = max((response for _, response in case.lengths), default=0)
        mine = rows_of(case, case.sources[rank], ("values", "returns", "advantages"), width)
        batch = exchange.number(mine)
        mine, table, sources = batch.rows, batch.table, batch.owners
        assert sources == case.sources and mine.ids.tolist() == list(case.sources[rank])
        assert table.prompt_ids.tolist() == list(case.prompt_ids)
        assert list(zip(table.prompt_lengths.tolist(), table.response_lengths.tolist(), strict=True)) == list(
            case.lengths
        )
        assert table.max_response_length == width
        moved = exchange.move(batch, case.destinations, ["values", "returns"])
        assert_rows(moved.rows, case, case.destinations[rank], {"values", "returns"})
        more = exchange.move_fields(batch, ["advantages"], moved).rows
        assert_rows(more, case, case.destinations[rank], {"values", "returns", "advantages"})
        aged = replace(mine, fields=mine.fields | {"ages": torch.tensor([row + 0.5 for row in mine.ids])})
        found = exchange.move_fields(Batch(aged, table, sources), ["ages"], moved).rows.fields["ages"]
        assert found.tolist() == [row + 0.5 for row in case.destinations[rank]] and found.dtype == torch.float32
        columns = torch.tensor([0.0, 0.25, -9.0])
        marked = replace(mine, fields=mine.fields | {"marks": mine.ids[:, None] + columns})
        found = exchange.move(Batch(marked, table, sources), case.destinations, ["marks", "values"]).rows.fields[
            "marks"
        ]
        assert found.shape == (len(case.destinations[rank]), 3), "with their number even where no row is"
        assert found.tolist() == [[row + 0.0, row + 0.25, row - 9.0] for row in case.destinations[rank]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_rows_go_from_any_sources_to_any_destinations(world_size: int) -> None:
    cases = generate(world_size)
    assert any(() in case.sources and case.lengths for case in cases) == (world_size > 1)
    run_ranks(world_size, check_moves, cases)


LENGTHS = ((3, 4), (1, 6), (5, 1), (2, 2), (4, 5), (2, 3), (1, 1), (2, 7))
PROMPT_IDS = (0, 0, 1, 1, 2, 2, 3, 3)


def through_two_components(rank: int, world_size: int) -> None:
    """Owners -> dp2, whose results go back from its output ranks; with them to tp2."""
    exchange = Exchange(dist.group.WORLD)
    dp2, tp2 = Layout((1, 3)), Layout((2, 0), tensor=2)
    shards = ((7, 0, 3), (1, 2, 4, 5, 6))
    owned_by = ((0, 1), (2, 3), (4, 5), (6, 7))
    case = Case(LENGTHS, owned_by, shard_destinations(dp2, shards, world_size), PROMPT_IDS)
    owned = exchange.number(rows_of(case, owned_by[rank], (), 7))
    assert owned.table.split(world_size) == owned.owners
    at_dp2 = exchange.move(owned, case.destinations, [])
    assert_rows(at_dp2.rows, case, ((), shards[0], (), shards[1])[rank], set())
    sources = output_sources(dp2, shards, world_size)
    results = rows_of(case, sources[rank], ("values",), 7)
    results = replace(results, ids=torch.tensor(sources[rank], dtype=torch.int64))
    back = exchange.move_fields(Batch(results, owned.table, sources), ["values"], owned).rows
    assert_rows(back, case, owned_by[rank], {"values"})
    everything = (tuple(range(len(LENGTHS))),)
    destinations = shard_destinations(tp2, everything, world_size)
    at_tp2 = exchange.move(Batch(back, owned.table, owned_by), destinations, ["values"])
    assert_rows(at_tp2.rows, case, everything[0] if rank in (0, 2) else (), {"values"})


def test_results_of_one_layout_reach_another() -> None:
    run_ranks(4, through_two_components)


def one_row_twice(rank: int, world_size: int) -> None:
    case = Case(LENGTHS, ((0, 1), (3, 1)), (), PROMPT_IDS)
    with pytest.raises(ValueError, match=r"each row must be there once; found several times.*: \[\[0, 3\]\]"):
        Exchange(dist.group.WORLD).number(rows_of(case, case.sources[rank], (), 7))


def test_a_row_on_two_ranks_is_refused_on_both() -> None:
    run_ranks(2, one_row_twice)


def rows_filtered(rank: int, world_size: int) -> None:
    """Rows that a filter keeps, any number per prompt, are renumbered and moved like others."""
    exchange = Exchange(dist.group.WORLD)
    prompt_ids = (0, 2, 2, 2, 2, 5, 5, 6)
    case = Case(LENGTHS, ((7, 0), (5, 3, 1), (2, 6, 4)), (), prompt_ids)
    batch = exchange.number(rows_of(case, case.sources[rank], ("values",), 7))
    owners = batch.table.split(world_size)
    assert owners == ((0,), (1, 2, 3, 4), (5, 6, 7))
    owned = exchange.move(batch, owners, ["values"]).rows
    assert_rows(owned, case, owners[rank], {"values"})
    kept = [1, 2, 4, 6, 7]
    owned = owned.select([i for i, row in enumerate(owned.ids.tolist()) if row in kept])
    batch = exchange.number(owned)
    assert (batch.table.prompt_ids.tolist(), batch.owners) == ([2, 2, 2, 5, 6], ((), (0, 1, 2), (3, 4)))
    everywhere = ((0, 1, 2, 3, 4),) * world_size
    moved = exchange.move(batch, everywhere, ["values"]).rows
    assert moved.prompt_ids.tolist() == [prompt_ids[row] for row in kept]
    source = oracle(LENGTHS)
    for new, old in enumerate(kept):
        assert moved.sequences[new].tolist() == source[old]["input_ids"].tolist()
        assert moved.fields["values"][new, : LENGTHS[old][1]].tolist() == source[old]["values"].tolist()


def test_rows_that_a_filter_keeps_are_renumbered() -> None:
    run_ranks(3, rows_filtered)


def errors_reach_everybody(rank: int, world_size: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    exchange.raise_together(None)
    error = KeyError("no such file") if rank == 1 else None
    expected: tuple[type[Exception], str] = (
        (KeyError, "no such file") if rank == 1 else (RuntimeError, "rank 1 failed: KeyError: 'no such file'")
    )
    with pytest.raises(expected[0], match=expected[1]) as caught:
        exchange.raise_together(error)
    assert (caught.value is error) == (rank == 1)
    assert exchange.all_gather(rank * 10) == [0, 10, 20], "the exchange goes on after an error"


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    run_ranks(3, errors_reach_everybody)


def values_of_all_lengths(rank: int, world_size: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    for lengths in itertools.product((0, 100, 10_000), repeat=world_size):
        values = [(of_rank, "x" * length) for of_rank, length in enumerate(lengths)]
        assert exchange.all_gather(values[rank]) == values


def test_values_of_any_length_are_shared() -> None:
    run_ranks(3, values_of_all_lengths)


# --- who holds what: plain arithmetic ---


@given(counts=st.lists(st.integers(1, 5), max_size=40), size=st.integers(1, 9))
def test_parts_are_contiguous_even_and_keep_a_prompt_together(counts: list[int], size: int) -> None:
    prompt_ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64)) * 3
    parts = RowTable(prompt_ids, prompt_ids, prompt_ids, prompt_ids).split(size)
    assert len(parts) == size
    assert [row for part in parts for row in part] == list(range(sum(counts)))
    prompts_of = [{int(prompt_ids[row]) for row in part} for part in parts]
    assert sum(map(len, prompts_of)) == len(counts)
    assert max(map(len, prompts_of)) - min(map(len, prompts_of)) <= 1


LAYOUTS = {
    "dp2 on ranks 3 and 1": (Layout((3, 1)), {3: 0, 1: 1}, {3: 0, 1: 1}),
    "tp2 dp2": (Layout((0, 1, 2, 3), tensor=2), {0: 0, 1: 0, 2: 1, 3: 1}, {0: 0, 2: 1}),
    "pp2 dp2": (Layout((0, 1, 2, 3), pipeline=2), {0: 0, 1: 1, 2: 0, 3: 1}, {2: 0, 3: 1}),
    "tp2 pp2": (Layout((4, 0, 1, 2), tensor=2, pipeline=2), {4: 0, 0: 0, 1: 0, 2: 0}, {1: 0}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_shards_are_on_all_their_ranks_and_results_on_one(name: str) -> None:
    layout, shard_of, output_of = LAYOUTS[name]
    shards = [(5, 0, 2), (1, 3, 4)][: layout.data]
    for where, expected in ((shard_destinations, shard_of), (output_sources, output_of)):
        found = where(layout, shards, 6)
        assert found == tuple(shards[expected[rank]] if rank in expected else () for rank in range(6))


def test_table_of_no_rows() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    table = RowTable(nothing, nothing, nothing, nothing)
    assert (len(table), table.max_response_length, table.lengths.tolist()) == (0, 0, [])
