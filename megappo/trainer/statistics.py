"""Metrics over all ranks from each rank's part, in one small exchange each."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.models.train_engine import OptimizerStep


@dataclass(frozen=True)
class Statistics:
    """Of the values of all ranks."""

    mean: float
    max: float
    min: float


def field_statistics(exchange: Exchange, rows: Rows, fields: Mapping[str, torch.Tensor]) -> dict[str, Statistics]:
    """By name, over the response tokens of all rows of all ranks; fields are [b, R]."""
    mask = rows.response_mask.bool()
    return value_statistics(exchange, {name: field[mask] for name, field in fields.items()})


def value_statistics(exchange: Exchange, values: Mapping[str, torch.Tensor]) -> dict[str, Statistics]:
    """By name, over all ranks' values, [n] each; n may differ and be 0 on some ranks.

    Raises:
        ValueError: no rank has any value of a name.
    """
    parts = {name: _part(value) for name, value in values.items()}
    shared = exchange.share(parts)
    statistics = {}
    for name in parts:
        of_ranks = [part[name] for part in shared if part[name] is not None]
        if not of_ranks:
            raise ValueError(f"no value of {name!r} on any rank")
        counts, sums, maxima, minima = zip(*of_ranks, strict=True)
        statistics[name] = Statistics(sum(sums) / sum(counts), max(maxima), min(minima))
    return statistics


def as_metrics(statistics: Mapping[str, Statistics]) -> dict[str, float]:
    """`<name>/{mean,max,min}`."""
    return {f"{name}/{kind}": value for name, found in statistics.items() for kind, value in asdict(found).items()}


def _part(value: torch.Tensor) -> tuple[int, float, float, float] | None:
    if value.numel() == 0:
        return None
    return value.numel(), float(value.double().sum()), float(value.max()), float(value.min())


def training_metrics(exchange: Exchange, steps: list[OptimizerStep], name: str) -> dict[str, float]:
    """Metrics of a component's optimizer steps, averaged over the steps, and their number.

    Args:
        steps: on the component's output ranks, else empty. The parts of the data-parallel shards are added up.
        name: the component's.
    """
    shards = [of_rank for of_rank in exchange.share(steps) if of_rank]
    if not shards:
        return {}
    num_steps = len(shards[0])
    totals: dict[str, float] = defaultdict(float)
    for of_step in zip(*shards, strict=True):
        totals[f"{name}/grad_norm"] += of_step[0].grad_norm
        totals[f"{name}/lr"] += of_step[0].lr
        for metric in of_step[0].metrics:
            totals[metric] += sum(shard.metrics[metric] for shard in of_step)
    means = {metric: total / num_steps for metric, total in totals.items()}
    return means | {f"{name}/num_optimizer_steps": num_steps}
