"""Metrics over all ranks, from each rank's part in one small exchange."""

from collections.abc import Sequence
from typing import Any

import torch

from megappo.batch.exchange import Exchange
from megappo.batch.row_metrics import ROW_METRICS, SPREAD
from megappo.batch.rows import Rows
from megappo.models.train_engine import OptimizerStep
from megappo.observe.metrics import Metric, merge_metrics, reduce_ranks
from megappo.ppo.aggregation import Unreduced

NOT_KEPT = "skipped_rows_not_kept"
"""Metric of skipped optimizer steps: ranks on which their rows could not be written."""


def row_metrics(exchange: Exchange, rows: Rows) -> dict[str, Any]:
    """Return the ROW_METRICS that the run has, over the rows of all ranks."""
    return metrics_over_ranks(exchange, rows, {}, {})[0]


def metrics_over_ranks(
    exchange: Exchange, rows: Rows, extra: Unreduced, unlogged: Unreduced
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return `row_metrics` with extra metrics, and statistics that are not logged: all in one exchange.

    Args:
        extra, unlogged: of this rank's rows; the same names on every rank.
    """
    parts: dict[str, Metric] = {name: Metric.of(*part) for name, part in extra.items()}
    for name, metric in ROW_METRICS.items():
        found = metric.values(rows)
        if found is not None:
            for column, values in _columns(name, found).items():
                parts |= _parts(column, values, metric.reductions)
    found_parts = exchange.share((parts, {name: Metric.of(*part) for name, part in unlogged.items()}))
    logged, others = zip(*found_parts, strict=True)
    return reduce_ranks(logged), reduce_ranks(others)


def value_parts(name: str, values: torch.Tensor) -> dict[str, Metric]:
    """Return this rank's part of `<name>/{mean,max,min}` over all ranks' values, [n] each; n may differ and be 0."""
    return _parts(name, values, SPREAD)


def _columns(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return values by the name of their metric: [n] is one metric, [n, K] is K."""
    if values.dim() == 1:
        return {name: values}
    return {f"{name}/{i}": column for i, column in enumerate(values.unbind(1))}


def _parts(name: str, values: torch.Tensor, reductions: tuple[str, ...] | str) -> dict[str, Metric]:
    if isinstance(reductions, str):
        return {name: Metric.of(values, reductions)}
    values = values.double()
    return {f"{name}/{reduction}": Metric.of(values, reduction) for reduction in reductions}


def merge_optimizer_steps(ranks: Sequence[list[OptimizerStep]], name: str) -> list[dict[str, Metric]]:
    """Merge the data-parallel shards' metrics of each of a component's optimizer steps. A skipped step has NOT_KEPT at
    most.

    Args:
        ranks: steps of each of the component's output ranks; empty on other ranks.
        name: the component's.
    """
    shards = [steps for steps in ranks if steps]
    merged = []
    for parts in zip(*shards, strict=True):
        metrics = merge_metrics(part.metrics for part in parts)
        if not parts[0].skipped:
            metrics[f"{name}/grad_norm"] = Metric((parts[0].grad_norm,), "sum")
            metrics[f"{name}/lr"] = Metric((parts[0].lr,), "sum")
        merged.append(metrics)
    return merged


def training_metrics(steps: list[dict[str, Metric]], name: str) -> dict[str, Any]:
    """Return the metrics of a component's optimizer steps, averaged over the steps, and the number of steps."""
    if not steps:
        return {}
    done = [metrics for metrics in steps if f"{name}/lr" in metrics]
    found = {}
    for key in done[0] if done else ():
        found[key] = _over_steps([metrics[key] for metrics in done])
    not_kept = f"{name}/{NOT_KEPT}"
    found[f"{name}/num_optimizer_steps"] = len(done)
    found[f"{name}/skipped_steps"] = len(steps) - len(done)
    found[not_kept] = sum(int(metrics[not_kept].value) for metrics in steps if not_kept in metrics)
    return found


def _over_steps(parts: list[Metric]) -> Any:
    """Average sums, which are means over a mini-batch; merge anything else as over ranks."""
    if parts[0].reduction == "sum":
        return sum(one.value for one in parts) / len(parts)
    return Metric.merged(parts).value
