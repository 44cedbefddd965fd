"""Metrics over all ranks against plain loops over all values in one place."""

import math
import statistics

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.batch.row_metrics import ROW_METRICS, RowMetric, log_prob_diff
from megappo.batch.rows import NO_TOKENS, Rows
from megappo.models.train_engine import OptimizerStep
from megappo.observe.metrics import Histogram, Metric
from megappo.trainer.statistics import merge_optimizer_steps, over_ranks, row_metrics, spread, training_metrics

SCORES = ([3.0, -1.5, 4.0], [], [0.25])
LENGTHS = ([1, 2], [2, 2, 3], [])


def plain_statistics(name: str, values: list[float]) -> dict[str, float]:
    return {f"{name}/mean": sum(values) / len(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def check_values(rank: int, world_size: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    for name, values in (("score", SCORES), ("length", LENGTHS)):
        found = over_ranks(exchange, spread(name, torch.tensor(values[rank], dtype=torch.float32)))
        assert found == pytest.approx(plain_statistics(name, sum(values, [])))
    weights = torch.tensor(SCORES[rank]).abs()
    statistics_of_weights = {"variance": (weights, "variance"), "ess": (weights, "ess")}
    everything = [abs(score) for score in sum(SCORES, [])]
    ess = sum(everything) ** 2 / (len(everything) * sum(weight * weight for weight in everything))
    expected = {"variance": statistics.variance(everything), "ess": ess}
    assert over_ranks(exchange, statistics_of_weights) == pytest.approx(expected, rel=1e-12)
    nothing = over_ranks(exchange, spread("score", torch.zeros(0)))
    assert math.isnan(nothing["score/mean"]) and nothing["score/max"] == -math.inf


def test_values_of_all_ranks_count_alike() -> None:
    run_ranks(3, check_values)


def make_rows() -> Rows:
    """Five rows; a mask with a hole, and fields whose padding would win if it counted."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).float()
    generator = torch.Generator().manual_seed(0)
    names = ("values", "returns", "old_log_probs", "rollout_log_probs")
    fields = {name: torch.randn(5, 4, generator=generator) + 100 * (1 - mask) for name in names}
    fields |= {"response_mask": mask, "scores": torch.randn(5), "truncated": torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])}
    fields["score_components"] = torch.stack([fields["scores"] - 2.0, torch.full((5,), 2.0)], dim=1)
    lengths = (mask * torch.arange(1, 5)).amax(1).long()
    return Rows(torch.arange(5), torch.arange(5), torch.ones_like(lengths), lengths, NO_TOKENS, fields)


def of_tokens(rows: Rows, field: torch.Tensor) -> list[float]:
    mask = rows.fields["response_mask"]
    return [float(field[row, t]) for row in range(5) for t in range(4) if mask[row, t]]


def first_values_of(rows: Rows) -> torch.Tensor | None:
    """None of rows of other tests, whose calls the rank makes later."""
    return rows.fields["values"][:, 0] if "values" in rows.fields else None


def check_rows(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    rows = make_rows()
    ROW_METRICS.register("values/first", RowMetric(first_values_of, ("min", "sum", "histogram")))
    ROW_METRICS.register("absent", RowMetric(lambda rows: None))
    found = row_metrics(Exchange(dist.group.WORLD), rows.select([[0, 1, 2], [], [3, 4]][rank]), 1)
    fields = rows.fields
    first = fields["values"][:, 0].tolist()
    distributions = {
        "values/first": first,
        "reward/score": fields["scores"].tolist(),
        "rollout/response_length": rows.response_lengths.tolist(),
        "returns": of_tokens(rows, fields["returns"]),
        "values": of_tokens(rows, fields["values"]),
        "critic/vf_error": of_tokens(rows, fields["values"] - fields["returns"]),
    }
    for name, values in distributions.items():
        histogram = found.pop(f"{name}/histogram")
        assert histogram.numbers[:2] == pytest.approx((sum(values), sum(x * x for x in values)))
        assert sum(histogram.numbers[2:]) == len(values)
    assert found == pytest.approx(
        plain_statistics("reward/score", fields["scores"].tolist())
        | {"reward/score/std": statistics.stdev(fields["scores"].tolist())}
        | plain_statistics("reward/score_component/0", [score - 2.0 for score in fields["scores"].tolist()])
        | plain_statistics("reward/score_component/1", [2.0])
        | plain_statistics("rollout/response_length", rows.response_lengths.tolist())
        | {"rollout/truncated_frac": 2 / 5, "rollout/masked_frac": 0.0}
        | plain_statistics("returns", of_tokens(rows, fields["returns"]))
        | plain_statistics("values", of_tokens(rows, fields["values"]))
        | {"values/first/min": min(first), "values/first/sum": sum(first)}
    )
    second = row_metrics(Exchange(dist.group.WORLD), rows.select([[0, 1, 2], [], [3, 4]][rank]), 2)
    assert second == pytest.approx(found), "histograms are made in some steps only"


def test_metrics_of_rows_are_of_all_ranks_response_tokens_and_one_registration_adds_one() -> None:
    run_ranks(3, check_rows)


def check_staleness(rank: int, world_size: int) -> None:
    """Weights of the step wrote the first and the fourth of five rows alone."""
    rows = make_rows()
    ages = torch.tensor([[0, 0, 0, 0], [2, 0, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [3, 3, 0, 0]]).float()
    rows.fields["staleness"] = ages
    exchange, own = Exchange(dist.group.WORLD), [[0, 1, 2], [], [3, 4]][rank]
    found = row_metrics(exchange, rows.select(own), 1)
    for name, values in (("staleness", of_tokens(rows, ages)), ("response_staleness", [0.0, 2.0, 1.0, 0.0, 3.0])):
        assert found[f"rollout/{name}/mean"] == pytest.approx(sum(values) / len(values))
        assert found[f"rollout/{name}/max"] == 3.0
        assert sum(found[f"rollout/{name}/histogram"].numbers[2:]) == len(values)
    assert found["rollout/mixed_versions_frac"] == pytest.approx(1 / 5)
    difference = (rows.fields["old_log_probs"] - rows.fields["rollout_log_probs"]).abs()
    fresh = difference[0, :2].tolist() + difference[3].tolist()
    assert sum(exchange.all_gather(differences_of(rows.select(own))), []) == pytest.approx(fresh)
    rows.fields["staleness"] = ages + 1
    assert log_prob_diff(rows) is None, "no token proves the weights"


def differences_of(rows: Rows) -> list[float]:
    differences = log_prob_diff(rows)
    return [] if differences is None else differences.tolist()


def test_the_age_of_tokens_is_a_metric_and_those_of_older_weights_do_not_prove_the_newest() -> None:
    run_ranks(3, check_staleness)


def check_groups(rank: int, world_size: int) -> None:
    prompts, scores = torch.tensor([4, 4, 4, 7, 7, 9]), torch.tensor([1.0, 1.0, 1.0, 0.0, 0.5, 3.0])
    lengths = torch.ones(6, dtype=torch.int64)
    rows = Rows(torch.arange(6), prompts, lengths, lengths, NO_TOKENS, {"scores": scores})
    share = row_metrics(Exchange(dist.group.WORLD), rows.select([[0, 1, 2], [3, 4, 5], []][rank]), 1)
    assert share["reward/equal_groups_frac"] == pytest.approx(2 / 3)
    alone = row_metrics(Exchange(dist.group.WORLD), rows.select([[0], [3], [5]][rank]), 1)
    assert "reward/equal_groups_frac" not in alone


def test_groups_of_equal_scores_are_counted_where_prompts_have_several_responses() -> None:
    run_ranks(3, check_groups)


def repetition_of(responses: list[list[int]], turns: list[list[int]] | None = None) -> list[float]:
    lengths = torch.tensor([len(response) for response in responses])
    tokens = torch.tensor([token for response in responses for token in (1, 1, 1, 1, *response)])
    fields = {}
    if turns is not None:
        width = int(lengths.max())
        fields["turns"] = torch.tensor([[*row, *[0] * (width - len(row))] for row in turns]).float()
    ids = torch.arange(len(responses))
    rows = Rows(ids, ids, torch.full_like(ids, 4), lengths, tokens, fields)
    return ROW_METRICS["rollout/repetition_frac"].values(rows).tolist()


def test_responses_that_end_in_a_loop_are_found() -> None:
    text = list(range(100, 400))
    loop = text[:100] + [5, 6, 7] * 100
    assert repetition_of([text, loop, [9] * 20, [1, 2], [], [3, 4] * 3, loop + text]) == [0, 1, 1, 0, 0, 0, 0]
    played = [9] * 8 + [5, 6] * 8
    assert repetition_of([played, played], [[1] * 8 + [0] * 16, [0] * 8 + [1, 0] * 8]) == [1, 0]


def step(grad_norm: float, lr: float, loss: float, ratio: float, ratios: list[float]) -> OptimizerStep:
    parts = {"loss": (loss, "sum"), "ratio_max": (ratio, "max"), "ratio_min": (ratio, "min")}
    parts |= {"ratios": (torch.tensor(ratios), "histogram"), "length": (torch.tensor(ratios), "mean")}
    return OptimizerStep(grad_norm, lr, {f"actor/{name}": Metric.of(*part) for name, part in parts.items()})


# Two optimizer steps on two output ranks; rank 1 reports nothing.
STEPS = (
    [step(2.0, 0.1, 0.5, 1.5, [1.0]), step(4.0, 0.2, -1.0, 1.2, [])],
    [],
    [step(2.0, 0.1, 0.25, 0.5, [2.0, 4.0]), step(4.0, 0.2, 3.0, 1.1, [5.0])],
)


def check_training(rank: int, world_size: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    found = training_metrics(merge_optimizer_steps(exchange.all_gather(STEPS[rank]), "actor"), "actor")
    loss = ((0.5 + 0.25) + (-1.0 + 3.0)) / 2
    histogram = found.pop("actor/ratios")
    assert isinstance(histogram, Histogram) and histogram.numbers[:2] == (12.0, 46.0)
    of_component = {"actor/grad_norm": 3.0, "actor/lr": 0.15, "actor/num_optimizer_steps": 2}
    of_component |= {"actor/skipped_steps": 0}
    of_loss = {"actor/loss": loss, "actor/ratio_max": 1.5, "actor/ratio_min": 0.5, "actor/length": 3.0}
    assert found == pytest.approx(of_loss | of_component)
    assert training_metrics(merge_optimizer_steps(exchange.all_gather([]), "critic"), "critic") == {}


def test_parts_of_shards_are_merged_and_the_sums_of_steps_averaged() -> None:
    run_ranks(3, check_training)
