"""Metrics over all ranks, from each rank's part in one small exchange; and the MFU of updates."""

import time
from collections.abc import Sequence
from itertools import chain

import torch

from megappo.architecture.architecture import DTYPES
from megappo.architecture.flops import flops_of
from megappo.batch.exchange import Exchange
from megappo.batch.row_metrics import HISTOGRAM, ROW_METRICS, SPREAD
from megappo.batch.rows import Rows
from megappo.models.megatron_config import TORCH_DTYPES
from megappo.models.train_engine import OptimizerStep
from megappo.observe.metrics import Metric, RankMetrics, Reduced, merge_metrics, reduce_ranks
from megappo.ppo.reductions import Unreduced
from megappo.runtime import platform
from megappo.runtime.gpus import find_gpu
from megappo.trainer.component_batch import ComponentBatch, shards_of
from megappo.trainer.models import Models, architecture_of

MEASURED_SIDE, NUM_MEASUREMENTS = 512, 10
"""Size of the square matrices whose product measures a device without a data sheet, and the number of measurements, of
which the fastest counts."""
HISTOGRAM_INTERVAL = 10
"""Steps between histograms of rows: ranks exchange 250 numbers per histogram, and one to four per other metric."""


def over_ranks(exchange: Exchange, values: Unreduced) -> Reduced:
    """Return metrics of the values of all ranks; the same names on every rank."""
    parts = {name: Metric.of(*part) for name, part in values.items()}
    return reduce_ranks(exchange.all_gather(parts))


def logs_histograms(step: int) -> bool:
    """Return whether a step logs metrics of many numbers: histograms, and the calibration of values."""
    return step == 1 or step % HISTOGRAM_INTERVAL == 0


def row_metrics(
    exchange: Exchange,
    rows: Rows,
    step: int,
    extra: Unreduced | None = None,
) -> Reduced:
    """Return the ROW_METRICS that the run has, and extra metrics, over the rows of all ranks.

    Histograms are logged in the first step and in every `HISTOGRAM_INTERVAL`-th.
    """
    has_histograms = logs_histograms(step)
    values = dict(extra or {})
    for name, metric in ROW_METRICS.items():
        of_rows = metric.values(rows)
        if of_rows is None:
            continue
        columns = {name: of_rows}
        if of_rows.dim() > 1:
            columns = {f"{name}/{i}": column for i, column in enumerate(of_rows.unbind(1))}
        for column, of_column in columns.items():
            if isinstance(metric.reductions, str):
                values[column] = (of_column, metric.reductions)
            else:
                reductions = [name for name in metric.reductions if has_histograms or name != HISTOGRAM]
                values |= spread(column, of_column, reductions)
    return over_ranks(exchange, values)


def spread(name: str, values: torch.Tensor, reductions: Sequence[str] = SPREAD) -> Unreduced:
    """Return values [n] by the names of their metrics `<name>/{mean,max,min}`; n may be 0 on a rank."""
    return {f"{name}/{reduction}": (values, reduction) for reduction in reductions}


def merge_optimizer_steps(ranks: Sequence[list[OptimizerStep]], name: str) -> list[RankMetrics]:
    """Merge the data-parallel shards' metrics of each of a component's optimizer steps; {} for a skipped step.

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


def training_metrics(steps: list[RankMetrics], name: str) -> Reduced:
    """Return the metrics of a component's optimizer steps over the steps, and the number of steps."""
    if not steps:
        return {}
    done = [metrics for metrics in steps if metrics]
    reduced = {}
    for key in done[0] if done else ():
        parts = [metrics[key] for metrics in done]
        if parts[0].reduction == "sum":  # a mean over each mini-batch
            reduced[key] = sum(one.value for one in parts) / len(parts)
        else:
            reduced[key] = Metric.merged(parts).value
    return reduced | {f"{name}/num_optimizer_steps": len(done), f"{name}/skipped_steps": len(steps) - len(done)}


class Utilisation:
    """MFU: the model's own work in an update, as a share of what the component's ranks could have computed meanwhile.

    All ranks build it together.

    Attributes:
        peaks: component -> operations per second of all its ranks together.
    """

    def __init__(self, models: Models, exchange: Exchange):
        peaks = exchange.all_gather(peak_flops(models.config.model.dtype)) if models.training else []
        self._flops = {name: flops_of(architecture_of(models.specs[name])) for name in models.training}
        self.peaks = {}
        for name in models.training:
            self.peaks[name] = sum(peaks[rank] for rank in models.components[name].layout.ranks)

    def mfu(self, shard: ComponentBatch, num_steps: int, seconds: float) -> float:
        """Return the MFU of `num_steps` optimizer steps, as if all mini-batches had equally many tokens.

        Recomputation, padding and pipeline stages that wait count as lost.

        Source: Chowdhery et al. 2022 (PaLM), appendix B; `architecture.flops`.
        """
        name = shard.component.name
        table = shard.batch.table
        trained = sorted(chain.from_iterable(shards_of(shard.trained)))
        lengths = list(zip(table.lengths[trained].tolist(), table.response_lengths[trained].tolist(), strict=True))
        flops = self._flops[name]
        num_epochs = num_steps / len(shard.split)
        return num_epochs * flops.training * flops.forward(lengths) / (self.peaks[name] * seconds)


def peak_flops(dtype: str) -> float:
    """Return this rank's floating-point operations per second: by the data sheet of its GPU, or measured.

    Ranks that share a CPU measure at the same time, and so share it.

    Args:
        dtype: "fp32" or "bf16".
    """
    gpu = find_gpu(torch.cuda.get_device_name(platform.device())) if platform.has_cuda() else None
    if gpu is not None:
        return gpu.flops if DTYPES[dtype].nbytes == 2 else gpu.fp32_flops
    side = MEASURED_SIDE * (8 if platform.has_cuda() else 1)
    matrix = torch.ones(side, side, dtype=TORCH_DTYPES[dtype], device=platform.device())
    seconds = []
    for _ in range(NUM_MEASUREMENTS):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the product
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / min(seconds)
