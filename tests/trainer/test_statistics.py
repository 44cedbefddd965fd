"""Metrics over all ranks against plain loops over all values in one place."""

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.models.train_engine import OptimizerStep
from megappo.trainer.statistics import as_metrics, field_statistics, training_metrics, value_statistics

SCORES = ([3.0, -1.5, 4.0], [], [0.25])
LENGTHS = ([1, 2], [2, 2, 3], [])


def plain_statistics(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}/mean": sum(values) / len(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def check_values(rank: int, world_size: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    values = {"score": torch.tensor(SCORES[rank]), "length": torch.tensor(LENGTHS[rank], dtype=torch.float32)}
    found = as_metrics(value_statistics(exchange, values))
    expected = plain_statistics("score", sum(SCORES, [])) | plain_statistics("length", sum(LENGTHS, []))
    assert found == pytest.approx(expected)
    with pytest.raises(ValueError, match="no value of 'score' on any rank"):
        value_statistics(exchange, {"length": torch.ones(1), "score": torch.zeros(0)})


def test_values_of_all_ranks_count_alike() -> None:
    run_ranks(3, check_values)


def make_fields() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A mask [5, 4] with a hole, and fields whose padding would win if it counted."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).float()
    generator = torch.Generator().manual_seed(0)
    fields = {name: torch.randn(5, 4, generator=generator) + 100 * (1 - mask) for name in ("values", "returns")}
    return mask, fields


def check_fields(rank: int, world_size: int) -> None:
    mask, fields = make_fields()
    mine = [[0, 1, 2], [], [3, 4]][rank]
    lengths = (mask[mine] * torch.arange(1, 5)).amax(1).long() if mine else torch.zeros(0, dtype=torch.int64)
    rows = Rows(torch.tensor(mine), torch.ones_like(lengths), lengths, [], {"response_mask": mask[mine]})
    mine_of = {name: field[mine] for name, field in fields.items()}
    found = as_metrics(field_statistics(Exchange(dist.group.WORLD), rows, mine_of))
    expected: dict[str, float] = {}
    for name, field in fields.items():
        tokens = [float(field[row, t]) for row in range(5) for t in range(4) if mask[row, t]]
        expected |= plain_statistics(name, tokens)
    assert found == pytest.approx(expected)


def test_only_response_tokens_of_all_ranks_count() -> None:
    run_ranks(3, check_fields)


# Two optimizer steps on two output ranks; rank 1 reports nothing.
STEPS = (
    [OptimizerStep(2.0, 0.1, {"actor/pg_loss": 0.5}), OptimizerStep(4.0, 0.2, {"actor/pg_loss": -1.0})],
    [],
    [OptimizerStep(2.0, 0.1, {"actor/pg_loss": 0.25}), OptimizerStep(4.0, 0.2, {"actor/pg_loss": 3.0})],
)


def check_training(rank: int, world_size: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    found = training_metrics(exchange, STEPS[rank], "actor")
    loss = ((0.5 + 0.25) + (-1.0 + 3.0)) / 2
    of_component = {"actor/grad_norm": 3.0, "actor/lr": 0.15, "actor/num_optimizer_steps": 2}
    assert found == pytest.approx({"actor/pg_loss": loss} | of_component)
    assert training_metrics(exchange, [], "critic") == {}


def test_parts_of_shards_add_up_and_steps_are_averaged() -> None:
    run_ranks(3, check_training)
