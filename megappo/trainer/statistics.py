"""Metrics over all ranks from each rank's part, in one small exchange each."""

from collections.abc import Sequence
from typing import Any

import torch

from megappo.batch.exchange import Exchange
from megappo.batch.metrics import ROW_METRICS, SPREAD
from megappo.batch.rows import Rows
from megappo.models.train_engine import OptimizerStep
from megappo.observe.metrics import Metric, merge_metrics, reduce_ranks
from megappo.ppo.aggregation import Unreduced

NOT_KEPT = "skipped_rows_not_kept"
"""Of skipped optimizer steps: on how many ranks their rows could not be written."""


def row_metrics(exchange: Exchange, rows: Rows) -> dict[str, Any]:
    """Those of ROW_METRICS that the run has, over the rows of all ranks."""
    return metrics_over_ranks(exchange, rows, {}, {})[0]


def metrics_over_ranks(
    exchange: Exchange, rows: Rows, told: Unreduced, looked_at: Unreduced
) -> tuple[dict[str, Any], dict[str, float]]:
    """As `row_metrics`, with what was told besides; and what is only looked at: all in one exchange.

    Args:
        told, looked_at: of this rank's rows; the same names on every rank.
    """
    parts: dict[str, Metric] = {name: Metric.of(*part) for name, part in told.items()}
    for name, metric in ROW_METRICS.items():
        found = metric.values(rows)
        for column, of_column in _columns(name, found).items() if found is not None else ():
            parts |= _parts(column, of_column, metric.reductions)
    of_ranks = exchange.share((parts, {name: Metric.of(*part) for name, part in looked_at.items()}))
    return reduce_ranks(part for part, _ in of_ranks), reduce_ranks(part for _, part in of_ranks)


def value_parts(name: str, values: torch.Tensor) -> dict[str, Metric]:
    """This rank's part of `<name>/{mean,max,min}` over all ranks' values, [n] each; n may differ and be 0 on some."""
    return _parts(name, values, SPREAD)


def _columns(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Values by the name of their metric: [n] of one, or [n, K] of K."""
    if values.dim() == 1:
        return {name: values}
    return {f"{name}/{i}": column for i, column in enumerate(values.unbind(1))}


def _parts(name: str, values: torch.Tensor, reductions: tuple[str, ...] | str) -> dict[str, Metric]:
    if isinstance(reductions, str):
        return {name: Metric.of(values, reductions)}
    values = values.double()  # once
    return {f"{name}/{reduction}": Metric.of(values, reduction) for reduction in reductions}


def steps_of_ranks(of_ranks: Sequence[list[OptimizerStep]], name: str) -> list[dict[str, Metric]]:
    """Metrics of each of a component's optimizer steps, the parts of its data-parallel shards merged; where it was
    skipped, at most NOT_KEPT.

    Args:
        of_ranks: of the component's output ranks, of others none.
        name: the component's.
    """
    shards = [of_rank for of_rank in of_ranks if of_rank]
    if not shards:
        return []
    of_steps = [merge_metrics(shard.metrics for shard in of_step) for of_step in zip(*shards, strict=True)]
    for found, step in zip(of_steps, shards[0], strict=True):
        if step.skipped:
            continue
        found |= {f"{name}/grad_norm": Metric((step.grad_norm,), "sum"), f"{name}/lr": Metric((step.lr,), "sum")}
    return of_steps


def training_metrics(of_steps: list[dict[str, Metric]], name: str) -> dict[str, Any]:
    """Metrics of a component's optimizer steps, sums averaged over the steps, and their number."""
    if not of_steps:
        return {}
    made = [metrics for metrics in of_steps if f"{name}/lr" in metrics]
    found = {key: _over_steps([metrics[key] for metrics in made]) for key in made[0]} if made else {}
    not_kept = sum(int(metrics[key].value) for metrics in of_steps if (key := f"{name}/{NOT_KEPT}") in metrics)
    numbers = {"num_optimizer_steps": len(made), "skipped_steps": len(of_steps) - len(made), NOT_KEPT: not_kept}
    return found | {f"{name}/{key}": number for key, number in numbers.items()}


def _over_steps(parts: list[Metric]) -> Any:
    """The mean of sums, which are means over a mini-batch; anything else as over ranks."""
    if parts[0].reduction == "sum":
        return sum(one.value for one in parts) / len(parts)
    return Metric.merged(parts).value
