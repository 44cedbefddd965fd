"""Splitting a step's rows, scattering them, and gathering results, against Hugging Face and plain arithmetic."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ppo_engines import SPEC, Case, at_owners, hf_outputs, hf_value_head, make_engine, make_rows, with_score
from spawn import run_ranks
from tiny_models import hf_folder, hf_model

from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange, RowTable
from megappo.batch.rows import Rows
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.trainer.component_batch import Component, shards_of, split

# --- splitting ---


@settings(max_examples=200, deadline=None)
@given(
    num_mini_batches=st.integers(1, 4),
    prompts=st.integers(1, 4),
    rows_per_prompt=st.integers(1, 3),
    shards=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_mini_batches_are_consecutive_prompts_spread_over_the_shards(
    num_mini_batches: int, prompts: int, rows_per_prompt: int, shards: int, seed: int
) -> None:
    size = prompts * rows_per_prompt
    lengths = torch.randint(1, 50, (3, size * num_mini_batches), generator=torch.Generator().manual_seed(seed))
    table = RowTable(torch.arange(len(lengths[0])) // rows_per_prompt, *lengths)
    found = split(table, Layout(tuple(range(shards))), num_mini_batches)
    assert len(found) == num_mini_batches
    for number, mini_batch in enumerate(found):
        assert len(mini_batch) == shards
        rows = sorted(row for part in mini_batch for row in part)
        assert rows == list(range(number * size, (number + 1) * size)), "every row once, in consecutive prompts"
        tokens = [sum(table.lengths.tolist()[row] for row in part) for part in mini_batch]
        assert max(tokens) - min(tokens) <= max(table.lengths.tolist()[row] for row in rows), "balanced by tokens"
    assert shards_of(found) == tuple(
        tuple(row for mini_batch in found for row in mini_batch[shard]) for shard in range(shards)
    )


# --- scattering ---


def check_scattered(rank: int, world_size: int, rows_per_prompt: int, num_mini_batches: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    every = make_rows(91, rows_per_prompt=rows_per_prompt)
    batch = at_owners(exchange, every)
    layouts = [Layout((3, 1)), Layout((0, 1, 2, 3), tensor=2), Layout((2, 0), pipeline=2)]
    for layout in [*layouts, Layout((0, 1, 2, 3), context=2)]:
        component = Component("actor", SPEC, layout, exchange)
        scattered = component.scatter(batch, num_mini_batches)
        scattered.scatter_fields(batch, ["advantages", "returns"])
        parts = scattered.mini_batches()
        held = exchange.all_gather([part.ids.tolist() for part, _, _ in parts])
        size = len(every) // num_mini_batches
        for number, (part, num_tokens, num_sequences) in enumerate(parts):
            expected = list(range(number * size, (number + 1) * size))
            outputs = [layout.output_rank(shard) for shard in range(layout.data)]
            assert sorted(row for output in outputs for row in held[output][number]) == expected
            assert num_tokens == sum(int(every.response_mask[row].sum()) for row in expected)
            assert num_sequences == size
            assert_rows(part, every, {"response_mask", "advantages", "returns"})
        assert (rank in layout.ranks) == any(len(part) for part, _, _ in parts)
        for shard in range(layout.data):
            copies = [held[member] for member in layout.shard_ranks(shard)]
            assert copies.count(copies[0]) == len(copies), "all ranks of a shard work on the same rows"


def assert_rows(part: Rows, every: Rows, names: set[str]) -> None:
    """`part` is what its row numbers stand for in `every`."""
    expected = every.select(part.ids)
    assert part.fields.keys() == names
    assert torch.equal(part.response_lengths, expected.response_lengths)
    assert torch.equal(part.prompt_lengths, expected.prompt_lengths)
    assert torch.equal(part.input_ids, expected.input_ids) and len(part.sequences) == len(part)
    for name in names:
        assert torch.equal(part.fields[name], expected.fields[name]), name


@pytest.mark.parametrize(("rows_per_prompt", "num_mini_batches"), [(1, 3), (2, 1)])
def test_every_shard_gets_its_rows_of_each_mini_batch(rows_per_prompt: int, num_mini_batches: int) -> None:
    run_ranks(4, check_scattered, rows_per_prompt, num_mini_batches)


# --- forward ---

CASES = {
    "one rank that owns nothing": Case(Layout((0,))),
    "dp2 on some ranks": Case(Layout((1, 3)), max_tokens=9),
    "pp2 on some ranks": Case(Layout((0, 2), pipeline=2), max_tokens=9),
    "tp2 dp2": Case(Layout((0, 1, 2, 3), tensor=2), max_tokens=14),
    "pp2 dp2": Case(Layout((0, 1, 2, 3), pipeline=2), max_tokens=12),
    "pp2 vpp2 dp2": Case(Layout((0, 1, 2, 3), pipeline=2, virtual_pipeline=2), max_tokens=12),
    "cp2 dp2": Case(Layout((0, 1, 2, 3), context=2), max_tokens=12),
    "cp2 tp2": Case(Layout((0, 1, 2, 3), tensor=2, context=2), sequence=True, max_tokens=12),
}


def check_forward(
    rank: int, world_size: int, folder: Path, kind: str, expected: list[tuple[torch.Tensor, ...]]
) -> None:
    exchange = Exchange(dist.group.WORLD)
    batch = at_owners(exchange, make_rows(read_architecture(folder).vocab_size, rows_per_prompt=2))
    assert len(batch.rows) == (0, 2, 2, 2)[rank], "one rank must be without rows"
    groups = build_groups({name: case.layout for name, case in CASES.items()}, seed=0)
    names = {"log_probs": "old_log_probs", "entropy": "full_kl"} if kind == "actor" else {"values": "values"}
    for name, case in CASES.items():
        engine = make_engine(folder, case, groups[name], kind) if groups[name].member else None
        component = Component(kind, SPEC, case.layout, exchange, engine)
        for num_mini_batches in (1, 3):
            scattered = component.scatter(batch, num_mini_batches)
            owned = scattered.gather(scattered.forward(), names, batch).rows
            assert owned.ids.tolist() == batch.rows.ids.tolist()
            assert torch.equal(owned.fields["advantages"], batch.rows.fields["advantages"]), "other fields stay"
            for field, output in zip(names.values(), range(len(names)), strict=True):
                assert_field(owned, field, [expected[row][output] for row in owned.ids.tolist()], name)


def assert_field(owned: Rows, field: str, expected: list[torch.Tensor], name: str) -> None:
    for found, values in zip(owned.fields[field], expected, strict=True):
        torch.testing.assert_close(found[: len(values)], values, rtol=1e-5, atol=1e-5, msg=lambda m: f"{name}: {m}")
        assert not found[len(values) :].any(), "padding must be 0"


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_outputs_of_every_layout_come_home_to_their_rows(kind: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", "qwen2")
    head = hf_value_head(with_score(folder)) if kind == "critic" else None
    with torch.no_grad():
        expected = hf_outputs(hf_model(folder), head, make_rows(read_architecture(folder).vocab_size))
    run_ranks(4, check_forward, folder, kind, expected)
