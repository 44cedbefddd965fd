"""A step's metrics, reduced over micro-batches, steps and ranks."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy
import torch
from pydantic import TypeAdapter

from megappo.moments import explained_variance, merged_moments, moments
from megappo.observe.loggers import BUCKETS, Histogram

Numbers = tuple[float, ...]
Reduced = dict[str, Any]
"""A step's metrics over all ranks, by name: numbers and `Histogram`s."""


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


@cache
def _limits(device: torch.device) -> torch.Tensor:
    """Return BUCKETS on a device: copying them there at each use would synchronise it."""
    return torch.tensor(BUCKETS, dtype=torch.float64, device=device)


def _histogram_part(values: torch.Tensor) -> torch.Tensor:
    """Return sum, sum of squares and counts. NaN counts as no value: to drop it would synchronise the device."""
    buckets = torch.bucketize(values, _limits(values.device))
    counts = values.new_zeros(len(BUCKETS) + 1).index_add_(0, buckets, torch.ones_like(values))
    return torch.cat([torch.stack([values.nansum(), values.square().nansum()]), counts[:-1]])


def _add(parts: Sequence[Numbers]) -> Numbers:
    return tuple(map(sum, zip(*parts, strict=True)))


def _variance(count: float, mean: float, squares: float) -> float:
    """Return the variance with ddof 1."""
    return squares / (count - 1) if count > 1 else math.nan


def _pairs_part(pairs: torch.Tensor) -> torch.Tensor:
    """Return the moments of n numbers x, of as many y after them, and of y - x."""
    x, y = pairs.view(2, -1)
    return torch.cat([moments(x), moments(y), moments(y - x)])


def _merge_pairs(parts: Sequence[Numbers]) -> Numbers:
    columns = ([part[start : start + 3] for part in parts] for start in (0, 3, 6))
    return tuple(chain.from_iterable(map(merged_moments, columns)))


def _variances(numbers: Numbers) -> tuple[float, float, float]:
    """Return the variances of x, y and y - x."""
    return _variance(*numbers[:3]), _variance(*numbers[3:6]), _variance(*numbers[6:])


def _explained(*numbers: float) -> float:
    _, of_y, of_difference = _variances(numbers)
    return explained_variance(of_difference, of_y)


def _slope(*numbers: float) -> float:
    """Return the covariance of x and y over the variance of x; NaN where x does not vary."""
    of_x, of_y, of_difference = _variances(numbers)
    return (of_x + of_y - of_difference) / 2 / of_x if of_x > 0 else math.nan


def _calibration_part(differences: torch.Tensor) -> torch.Tensor:
    """Return the sum of (right - confidence) in each bin of confidence, 0.5 to 1, and the number of all values."""
    confidence = differences.abs().sigmoid()
    gaps = (differences > 0).double() - confidence
    bins = ((confidence - 0.5) * 2 * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    sums = gaps.new_zeros(CALIBRATION_BINS).index_add_(0, bins, gaps)
    return torch.cat([sums, sums.new_tensor([len(differences)])])


def _calibration_error(*numbers: float) -> float:
    *gaps, count = numbers
    return math.fsum(map(abs, gaps)) / count if count else math.nan


def _half_width(count: float, mean: float, squares: float) -> float:
    return NORMAL_95 * math.sqrt(_variance(count, mean, squares) / max(count, 1))


NORMAL_95 = 1.959963984540054
"""Standard deviations around the mean of a normal distribution within which 95 % of it lie."""
CALIBRATION_BINS = 10
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
    # Values are pairs: n numbers x, then as many y. Share of the variance of y that x explains; slope of y over x.
    "explained_variance": Reduction(_pairs_part, _merge_pairs, _explained),
    "slope": Reduction(_pairs_part, _merge_pairs, _slope),
    # Effective sample size of weights as a share of their number: (sum w)^2 / (n sum w^2); 0 where all are 0.
    "ess": Reduction(
        lambda weights: torch.stack([weights.sum(), weights.square().sum(), weights.new_tensor(len(weights))]),
        _add,
        lambda total, squares, count: total * total / (count * squares) if squares else 0.0,
    ),
    # Values are differences of scores x; x > 0 is right. Expected calibration error of the probability sigmoid(x).
    "calibration_error": Reduction(_calibration_part, _add, _calibration_error),
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
        part: numbers as the reduction has them. They are plain numbers: hundreds of small tensors would take far
            longer.
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


RankMetrics = dict[str, Metric]
"""A rank's part of metrics by name."""
_METRICS = TypeAdapter(RankMetrics)


def on_host(several: Sequence[Mapping[str, OnDevice]]) -> list[RankMetrics]:
    """Return the metrics as plain numbers, by one copy from the device."""
    parts = [one.part for metrics in several for one in metrics.values()]
    numbers = iter(torch.cat(parts).tolist() if parts else ())
    return [
        {name: Metric(tuple(islice(numbers, len(one.part))), one.reduction) for name, one in metrics.items()}
        for metrics in several
    ]


def metrics_from_json(metrics: Mapping[str, tuple[Sequence[float], str]]) -> RankMetrics:
    """Return metrics that were written as JSON.

    Raises:
        ValueError: they are of other types.
    """
    found = _METRICS.validate_python(metrics)
    if unknown := {metric.reduction for metric in found.values()} - REDUCTIONS.keys():
        raise ValueError(f"there is no reduction {unknown}")
    return found


def merge_metrics(several: Iterable[Mapping[str, Metric]]) -> RankMetrics:
    """Merge each name's parts, over the micro-batches, ranks or steps that have it."""
    parts: dict[str, list[Metric]] = defaultdict(list)
    for metrics in several:
        for name, metric in metrics.items():
            parts[name].append(metric)
    return {name: Metric.merged(of_name) for name, of_name in parts.items()}


def reduce_ranks(per_rank: Iterable[Mapping[str, Metric]]) -> Reduced:
    """Return the values of metrics, of which every rank has a part, or none has. The mean of no value is NaN."""
    return {name: metric.value for name, metric in merge_metrics(per_rank).items()}
