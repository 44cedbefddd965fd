"""Metrics over all ranks from each rank's part, in one small exchange each."""

from collections.abc import Mapping

import torch

from megappo.data.batch import Rows
from megappo.placement.exchange import Exchange


def field_statistics(exchange: Exchange, rows: Rows, fields: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """`<name>/{mean,max,min}` over the response tokens of all rows of all ranks; fields are [b, R]."""
    mask = rows.response_mask.bool()
    return value_statistics(exchange, {name: field[mask] for name, field in fields.items()})


def value_statistics(exchange: Exchange, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """`<name>/{mean,max,min}` over all ranks' values, [n] each; n may differ and be 0 on some ranks.

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
        statistics |= {f"{name}/mean": sum(sums) / sum(counts), f"{name}/max": max(maxima), f"{name}/min": min(minima)}
    return statistics


def _part(value: torch.Tensor) -> tuple[int, float, float, float] | None:
    if value.numel() == 0:
        return None
    return value.numel(), float(value.double().sum()), float(value.max()), float(value.min())


def training_metrics(exchange: Exchange, steps: list[dict[str, float]], prefix: str) -> dict[str, float]:
    """Metrics of a component's optimizer steps, averaged over the steps, and their number.

    Args:
        steps: one dict per optimizer step on the component's output ranks, else empty. Loss metrics are the
            data-parallel shards' parts and are added up; `grad_norm` and `lr`, which get the prefix, are the same on
            all of them.
    """
    shards = [of_rank for of_rank in exchange.share(steps) if of_rank]
    if not shards:
        return {}
    totals: dict[str, float] = {}
    for of_step in zip(*shards, strict=True):
        for name in of_step[0]:
            same = name in ("grad_norm", "lr")
            value = of_step[0][name] if same else sum(shard[name] for shard in of_step)
            totals[name] = totals.get(name, 0.0) + value
    num_steps = len(shards[0])
    means = {name if "/" in name else f"{prefix}/{name}": total / num_steps for name, total in totals.items()}
    return means | {f"{prefix}/num_optimizer_steps": num_steps}
