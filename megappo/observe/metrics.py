"""A step's metrics: reduced over ranks, and on disk, in metrics.jsonl."""

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from megappo.moments import merged_moments, moments
from megappo.observe.loggers import Logger, RunEnd, RunInfo
from megappo.observe.metrics_file import METRICS_FILE, read_metrics

_POSITIVE = 1e-6 * 1.25 ** torch.arange(125, dtype=torch.float64)
BUCKETS = torch.cat([-_POSITIVE.flip(0), _POSITIVE, torch.tensor([sys.float_info.max], dtype=torch.float64)])
"""Upper limits of a histogram's buckets, the same for all, so that histograms add up."""


@dataclass(frozen=True)
class Histogram:
    """A metric for trackers alone: the sum and the sum of squares of its values, and how many lie in each bucket."""

    numbers: tuple[float, ...]

    def bins(self) -> tuple[list[int], list[float]]:
        """Return the counts of the n buckets from the first with a value to the last, and their n + 1 limits; nothing
        without a value."""
        counts = [int(count) for count in self.numbers[2:]]
        filled = [index for index, count in enumerate(counts) if count]
        if not filled:
            return [], []
        first, last = filled[0], filled[-1]
        limits = [-sys.float_info.max, *BUCKETS.tolist()]
        return counts[first : last + 1], limits[first : last + 2]


def only_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers, without the histograms."""
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, Histogram)}


Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Reduction:
    """Functions that combine partial values into one.

    Attributes:
        part: sufficient statistics, [k], of values [n] float64; n may be 0.
        merge: the statistics of several parts together.
        value: the outcome, from the statistics of all values.
    """

    part: Callable[[torch.Tensor], torch.Tensor]
    merge: Callable[[Sequence[Numbers]], Numbers]
    value: Callable[..., float | Histogram] = lambda number: number


def _histogram_part(values: torch.Tensor) -> torch.Tensor:
    counts = torch.bucketize(values, BUCKETS.to(values.device)).bincount(minlength=len(BUCKETS))
    return torch.cat([torch.stack([values.sum(), values.square().sum()]), counts.double()])


def _add(parts: Sequence[Numbers]) -> Numbers:
    return tuple(map(sum, zip(*parts, strict=True)))


def _variance(count: float, mean: float, squares: float) -> float:
    """With ddof 1."""
    return squares / (count - 1) if count > 1 else math.nan


def _half_width(count: float, mean: float, squares: float) -> float:
    return NORMAL_95 * math.sqrt(_variance(count, mean, squares) / max(count, 1))


NORMAL_95 = 1.959963984540054
"""Standard deviations around the mean of a normal distribution within which 95 % of it lie."""
REDUCTIONS = {
    "sum": Reduction(lambda values: values.sum()[None], _add),
    "mean": Reduction(
        lambda values: torch.stack([values.sum(), values.new_tensor(len(values))]),
        _add,
        lambda total, count: total / count if count else math.nan,
    ),
    # Half the width of the 95 % confidence interval of the mean, by the central limit theorem.
    "ci95": Reduction(moments, merged_moments, _half_width),
    "variance": Reduction(moments, merged_moments, _variance),
    "std": Reduction(moments, merged_moments, lambda *parts: math.sqrt(_variance(*parts))),
    # Effective sample size of weights as a share of their number: (sum w)^2 / (n sum w^2); 0 where all are 0.
    "ess": Reduction(
        lambda weights: torch.stack([weights.sum(), weights.square().sum(), weights.new_tensor(len(weights))]),
        _add,
        lambda total, squares, count: total * total / (count * squares) if squares else 0.0,
    ),
    # NaN where any value is.
    "max": Reduction(
        lambda x: x.max()[None] if len(x) else x.new_tensor([-math.inf]), lambda parts: (float(numpy.max(parts)),)
    ),
    "min": Reduction(
        lambda x: x.min()[None] if len(x) else x.new_tensor([math.inf]), lambda parts: (float(numpy.min(parts)),)
    ),
    "histogram": Reduction(_histogram_part, _add, lambda *numbers: Histogram(numbers)),
}


class OnDevice(NamedTuple):
    """As `Metric`, with the part, [k] float64, on the device, which is not synchronised."""

    part: torch.Tensor
    reduction: str

    @classmethod
    def of(cls, values: torch.Tensor | float, reduction: str) -> "OnDevice":
        """Return the metric of all these values."""
        flat = torch.as_tensor(values, dtype=torch.float64).detach().flatten()
        return cls(REDUCTIONS[reduction].part(flat), reduction)


class Metric(NamedTuple):
    """A micro-batch's, a rank's or a step's part of a metric, and how parts become one.

    Attributes:
        part: numbers as the reduction has them. Plain ones: as tensors, so many small ones take far longer.
        reduction: one of REDUCTIONS.
    """

    part: Numbers
    reduction: str

    @classmethod
    def of(cls, values: torch.Tensor | float, reduction: str) -> "Metric":
        """Return the metric of all these values."""
        return cls(tuple(OnDevice.of(values, reduction).part.tolist()), reduction)

    @classmethod
    def merged(cls, parts: Sequence["Metric"]) -> "Metric":
        reduction = parts[0].reduction
        return cls(REDUCTIONS[reduction].merge([one.part for one in parts]), reduction)

    @property
    def value(self) -> float | Histogram:
        return REDUCTIONS[self.reduction].value(*self.part)


def on_host(several: Sequence[Mapping[str, OnDevice]]) -> list[dict[str, Metric]]:
    """The same as plain numbers, by one copy."""
    parts = [one.part for metrics in several for one in metrics.values()]
    numbers = iter(torch.cat(parts).tolist() if parts else ())
    return [
        {name: Metric(tuple(islice(numbers, len(one.part))), one.reduction) for name, one in metrics.items()}
        for metrics in several
    ]


def merge_metrics(several: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Each name's parts as one, over the micro-batches, ranks or steps that have it."""
    parts: dict[str, list[Metric]] = defaultdict(list)
    for metrics in several:
        for name, metric in metrics.items():
            parts[name].append(metric)
    return {name: Metric.merged(of_name) for name, of_name in parts.items()}


def reduce_ranks(per_rank: Iterable[Mapping[str, Metric]]) -> dict[str, Any]:
    """The values of metrics of which every rank has a part, or none. The mean of no value is NaN."""
    return {name: metric.value for name, metric in merge_metrics(per_rank).items()}


class MetricsFile(Logger):
    """Appends one line a step to metrics.jsonl, flushed at once."""

    def on_start(self, run: RunInfo) -> None:
        """Open the file. Drop what earlier runs logged for `resume_step` and later, so that no step stands twice.

        A run from step 0 on keeps an earlier one's metrics as metrics-DATE-TIME.jsonl, by the time of its last change.

        Raises:
            ConfigError: metrics.jsonl, which an earlier run left, cannot be read.
        """
        path = run.output_dir / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        if run.resume_step == 0 and path.exists():
            date = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
            path.rename(path.with_stem(f"{path.stem}-{date}"))
        _keep_steps_before(path, run.resume_step)
        self._file = path.open("a", encoding="utf-8")

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step. NaN and infinity, which JSON lacks, become null; histograms are left out."""
        finite = {name: value if math.isfinite(value) else None for name, value in only_numbers(metrics).items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()

    def on_end(self, end: RunEnd) -> None:
        """Close the file."""
        self._file.close()


def _keep_steps_before(path: Path, resume_step: int) -> None:
    kept = [metrics for metrics in read_metrics(path.parent) if metrics["step"] < resume_step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(metrics) + "\n" for metrics in kept), encoding="utf-8")
    temporary.replace(path)
