"""A step's rows go once to components that want them alike, against what each row's number stands for."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from ppo_engines import SPEC, Case, at_owners, make_engine, make_rows
from spawn import run_ranks
from tiny_models import hf_folder

from megappo.batch.exchange import Exchange
from megappo.batch.fields import FIELDS
from megappo.batch.rows import Rows
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.trainer.component_batch import Component, ComponentBatch

# Both ranks have all rows of all but the last, and a part each of the last one's.
LAYOUTS = {
    "actor": Layout((0, 2), tensor=2),
    "reference": Layout((0, 2), tensor=2),
    "critic": Layout((0, 2), pipeline=2),
    "judge": Layout((1, 2)),
}
OUTPUTS = {
    "actor": {"log_probs": "old_log_probs"},
    "reference": {"log_probs": "ref_log_probs"},
    "critic": {"values": "values", "bootstrap_values": "bootstrap_values"},
    "judge": {"log_probs": "rollout_log_probs"},
}
OUTPUT_RANKS = {"actor": (0,), "reference": (0,), "critic": (2,), "judge": (1, 2)}
WANTED = {
    "actor": ["advantages", "old_log_probs", "loss_weights"],
    "reference": [],
    "critic": ["loss_weights", "returns", "values"],
    "judge": ["returns", "bootstrap_values", "rollout_log_probs"],
}
OF_THE_ROLLOUT = ("response_mask", "advantages", "returns", "loss_weights")


def field_for(name: str, rows: Rows, width: int) -> torch.Tensor:
    """No two numbers of all rows and fields are equal."""
    first = [10_000 * list(FIELDS).index(name) + 100 * row + 1 for row in rows.ids.tolist()]
    if not FIELDS[name].per_token:
        return torch.tensor(first, dtype=torch.float32)
    field = torch.zeros(len(rows), width)
    for i, length in enumerate(rows.response_lengths.tolist()):
        for place in range(length):
            field[i, place] = first[i] + place
    return field


def assert_rows(found: Rows, every: Rows, names: set[str]) -> None:
    """Each with its own tokens, and with these fields alone."""
    for row, tokens in zip(found.ids.tolist(), found.sequences, strict=True):
        assert torch.equal(tokens, every.sequences[row])
    assert found.fields.keys() == names
    for name in names:
        assert torch.equal(found.fields[name], field_for(name, found, every.max_response_length)), name


def assert_scattered(at: dict[str, ComponentBatch], exchange: Exchange, every: Rows) -> None:
    """Exactly its own rows on each rank of each component, without fields yet."""
    ids = {name: exchange.all_gather(one.batch.rows.ids.tolist()) for name, one in at.items()}
    for name in ("actor", "reference", "critic"):
        assert [sorted(part) for part in ids[name]] == [sorted(every.ids.tolist()), [], sorted(every.ids.tolist())]
    assert ids["judge"][0] == [] and all(ids["judge"][1:]), "both of its shards have rows"
    assert sorted(ids["judge"][1] + ids["judge"][2]) == every.ids.tolist()
    for one in at.values():
        assert_rows(one.batch.rows, every, {"response_mask"})
    assert at["critic"].batch is at["reference"].batch is at["actor"].batch, "they went there once"
    assert at["judge"].batch is not at["actor"].batch


def check_moved(rank: int, world_size: int, folder: Path) -> None:
    exchange = Exchange(dist.group.WORLD)
    every = make_rows(91)
    fields = {name: field_for(name, every, every.max_response_length) for name in OF_THE_ROLLOUT}
    every = replace(every, fields=fields)
    batch = at_owners(exchange, every)
    groups = build_groups(LAYOUTS, seed=0)
    at: dict[str, ComponentBatch] = {}
    for name, layout in LAYOUTS.items():  # of the engines it matters alone which ranks have outputs
        engine = make_engine(folder, Case(layout), groups[name], "actor") if groups[name].member else None
        at[name] = Component(name, SPEC, layout, exchange, engine).scatter(batch, others=list(at.values()))
    assert_scattered(at, exchange, every)

    owned = batch
    for name, one in at.items():
        is_here = rank in OUTPUT_RANKS[name]
        names = OUTPUTS[name]
        outputs = {
            output: field_for(field, one.batch.rows, every.max_response_length) for output, field in names.items()
        }
        owned = one.gather(outputs if is_here else {}, names, owned)
    assert owned.rows.ids.tolist() == list(batch.owners[rank])
    assert_rows(
        owned.rows, every, {*OF_THE_ROLLOUT, *(field for names in OUTPUTS.values() for field in names.values())}
    )

    for name, names in WANTED.items():
        at[name].scatter_fields(owned, names)
    for name, one in at.items():
        assert_rows(one.batch.rows, every, {"response_mask", *WANTED[name]})


def test_each_component_gets_its_own(tmp_path: Path) -> None:
    run_ranks(3, check_moved, hf_folder(tmp_path / "hf", "qwen2"))
