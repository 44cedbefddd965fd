"""Gradients depend neither on the cut into micro-batches nor on the number of ranks: bugs of others.

Each bug is made here on the same engine, by what its loss returns, to see that the gradient's norm shows it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_training import hf_train
from ppo_engines import HEADS, LENGTHS, Case, make_engine, make_loss, make_rows, with_score
from spawn import run_ranks
from tiny_models import hf_folder

from megappo.batch.rows import Rows
from megappo.models.megatron_engine import Outputs
from megappo.models.train_engine import LossFn, TrainedEngine
from megappo.observe.metrics import Metric
from megappo.placement.groups import ComponentGroups, build_groups
from megappo.placement.layout import Layout

SMALL = 9
"""Tokens of a micro-batch: five of them for six rows."""
CASES = {
    "one rank": Case(Layout((0,))),
    "small micro-batches": Case(Layout((0,)), max_tokens=SMALL),
    "two ranks": Case(Layout((0, 1)), max_tokens=SMALL),
}
OF_RANK = ((3,), (0, 1, 2, 4, 5))
"""Rows of each of two ranks, with 2 and 13 tokens of the policy's."""


def scaled(loss: LossFn, factor: float) -> LossFn:
    def loss_fn(outputs: Outputs, rows: Rows) -> tuple[torch.Tensor, Mapping[str, Metric]]:
        total, metrics = loss(outputs, rows)
        return factor * total, metrics

    return loss_fn


def averaged_by_itself(kind: str) -> LossFn:
    """Return a loss that averages each micro-batch over its own tokens."""
    return lambda outputs, rows: make_loss(kind, rows)(outputs, rows)


def without_token_count(engine: TrainedEngine) -> None:
    """Make the engine return (loss, metrics), on which Megatron's schedule divides by the number of micro-batches."""
    whole = engine._loss
    engine._loss = lambda *args: whole(*args)[::2]


def norm(folder: Path, kind: str, name: str, groups: ComponentGroups, loss: LossFn, change: Callable | None) -> float:
    """Return the norm of a fresh engine's first gradient; ranks outside return nan, which fails every comparison."""
    if not groups.member:
        return float("nan")
    engine, rows = make_engine(folder, CASES[name], groups, kind), make_rows(91)
    if change is not None:
        change(engine)
    mine = OF_RANK[dist.get_rank()] if name == "two ranks" else range(len(rows))
    return engine.train_batch(rows.select(mine), loss).grad_norm


def check_gradients(rank: int, world_size: int, folder: Path, kind: str, expected: float) -> None:
    all_groups = build_groups({name: case.layout for name, case in CASES.items()}, seed=0)

    def found(name: str, loss: LossFn, change: Callable | None = None) -> float:
        return norm(folder, kind, name, all_groups[name], loss, change)

    rows = make_rows(91)
    right, mine = make_loss(kind, rows), rows.select(OF_RANK[rank])
    if rank == 0:
        assert found("one rank", right) == pytest.approx(expected, rel=2e-5)
        assert found("small micro-batches", right) == pytest.approx(expected, rel=2e-5)
        assert found("small micro-batches", averaged_by_itself(kind)) > 2 * expected
        assert found("small micro-batches", right, without_token_count) < expected / 2
    assert found("two ranks", right) == pytest.approx(expected, rel=2e-5)
    averaged = found("two ranks", scaled(right, 1 / world_size))
    assert averaged == pytest.approx(expected / 2, rel=2e-5)
    own_count = found("two ranks", scaled(make_loss(kind, mine), 1 / world_size))
    assert own_count > 1.4 * expected


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_gradients_are_hugging_faces_whatever_the_cut(kind: str, tmp_path: Path) -> None:
    """Four bugs that only change how large a gradient is, so that clipping and the learning rate mean something else:

    Megatron's schedule divided a loss by the number of micro-batches that was divided by global counts already:
    https://github.com/areal-project/AReaL/pull/1273 and https://github.com/verl-project/verl/pull/5867
    Each micro-batch was averaged over its own tokens, and the averages added up, of a distillation loss in
    https://github.com/verl-project/verl/issues/7200 and of the critic's in
    https://github.com/verl-project/verl/pull/6957
    Each rank divided by its own number of tokens, and gradients were averaged over ranks: tokens of ranks with few of
    them counted more. https://github.com/PrimeIntellect-ai/prime-rl/pull/2359
    And the plain one: averaged over ranks what had been divided by the tokens of all, a gradient smaller by the number
    of ranks.
    """
    folder = hf_folder(tmp_path / "hf", "qwen2")
    folder = with_score(folder) if HEADS[kind] == "value" else folder
    [expected] = hf_train(folder, kind, None, num_steps=1, lengths=LENGTHS)["grad_norms"]
    run_ranks(2, check_gradients, folder, kind, expected)
