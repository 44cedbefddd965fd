"""Conditions of the rules of `lab.report.health`: functions of a run's metrics so far, over its last steps. Torch-free.

A condition returns the figures of the rule's message where it holds, else (). Its thresholds are beyond what healthy
runs reach, so that a rule that holds is worth a line; docs/metrics.md has narrower ranges.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from statistics import fmean, median
from typing import Any

from megappo.observe.findings import LoggedMetrics

NUM_FIRST = 3
"""Steps at the start of a run that later ones are compared with."""
SPREAD = "reward/score/std"
SHAPED_RANGE = ("reward/shaped/min", "reward/shaped/max")
GRADIENT_NORMS = ("actor/grad_norm", "critic/grad_norm")

Figures = tuple[float, ...]


class History:
    """Values of some metrics, step by step; NaN where a step has none. NaN is neither above nor below anything.

    Attributes:
        config: all keys of the run, nested as in YAML, and `RunInfo.limits`.
    """

    def __init__(self, names: Iterable[str], config: Mapping[str, Any]) -> None:
        self.config = config
        self._series: dict[str, list[float]] = {name: [] for name in names}

    def add(self, metrics: LoggedMetrics) -> None:
        """Add a step. In metrics.jsonl a value that is not finite is None."""
        for name, series in self._series.items():
            value = metrics.get(name)
            series.append(math.nan if value is None else value)

    def last(self, name: str, num_steps: int) -> list[float]:
        """Return the values of the last steps; NaN before there are as many."""
        values = self._series[name][-num_steps:]
        return values if len(values) == num_steps else [math.nan] * num_steps

    def mean(self, name: str, num_steps: int = 3) -> float:
        """Return the mean over the last steps."""
        return fmean(self.last(name, num_steps))

    def known(self, name: str) -> list[float]:
        """Return the finite values of all steps."""
        return list(filter(math.isfinite, self._series[name]))

    def first(self, name: str) -> float:
        """Return the mean of the first NUM_FIRST values."""
        values = list(islice(filter(math.isfinite, self._series[name]), NUM_FIRST))
        return fmean(values) if len(values) == NUM_FIRST else math.nan


Condition = Callable[[History], Figures]


def outside(*names: str, low: float = -math.inf, high: float = math.inf, num_steps: int = 3) -> Condition:
    """Return a condition: the mean over the last steps is below `low` or above `high`, of the first of these metrics
    that the run has."""

    def figures(history: History) -> Figures:
        means = [history.mean(name, num_steps) for name in names]
        mean = next((mean for mean in means if not math.isnan(mean)), math.nan)
        return (mean,) if mean < low or mean > high else ()

    return figures


def grown(name: str, least: float) -> Condition:
    """Return a condition: the mean over the last steps is above `least`, and above 3 times the first."""

    def figures(history: History) -> Figures:
        now, first = history.mean(name), history.first(name)
        return (now, first) if now > 3 * first and now > least else ()

    return figures


def scores_vary(history: History) -> bool:
    """Return whether the task is unsolved: scores differ nearly as much as in the first steps.

    Where most scores have become equal, a policy without entropy and a critic that explains nothing may be right.
    """
    return history.mean(SPREAD) > 0.6 * history.first(SPREAD)


def all_scores_equal(history: History) -> Figures:
    """Hold unless teachers train the policy: scores may then be 0 or without effect."""
    if history.config.get("teachers"):
        return ()
    lowest, highest = min(history.last("reward/score/min", 5)), max(history.last("reward/score/max", 5))
    return (highest,) if lowest == highest else ()


def groups_equal(history: History) -> Figures:
    """Hold unless all scores are equal, which is a rule of its own, or teachers train the policy."""
    if history.config.get("teachers"):
        return ()
    share = history.mean("reward/equal_groups_frac", 5)
    return (share,) if share > 0.9 and not all_scores_equal(history) else ()


def entropy_collapsed(history: History) -> Figures:
    now, first = history.mean("actor/entropy"), history.first("actor/entropy")
    return (now, first) if now < 0.03 * first and scores_vary(history) else ()


def values_useless(history: History) -> Figures:
    """Hold where the critic explains less than nothing, or 0.4 less than it once did, and does not improve: a new
    critic explains far less than nothing at first."""
    name = "critic/vf_explained_var"
    last, known = history.last(name, 5), history.known(name)
    if not known or not scores_vary(history):
        return ()
    explained, best = fmean(last), median(sorted(known)[-3:])
    falls = last[-1] <= last[0] and explained < max(-0.2, best - 0.4)
    stays_negative = all(one < -0.05 for one in history.last(name, 20))
    return (explained, best) if falls or stays_negative else ()


def gradient_jumped(history: History) -> Figures:
    """Hold in an unsolved task alone: the whitened advantages of a few wrong responses have large gradients. One step
    is no jump: it is clipped, and healthy runs have it."""
    for name in GRADIENT_NORMS:
        norms = history.known(name)[-12:]
        before, now = norms[:-2], min(norms[-2:], default=math.nan)
        if len(before) >= 5 and now > 10 * median(before) > 0 and scores_vary(history):
            return (now, now / median(before))
    return ()


def value_loss_large(history: History) -> Figures:
    """Hold unless the loss falls: a new critic's is large at first."""
    last = history.last("critic/vf_loss", 5)
    variance = fmean(spread**2 for spread in history.last(SPREAD, 5))
    ratio = fmean(last) / (variance or math.nan)
    return (ratio,) if ratio > 10 and last[-1] >= last[0] else ()


def beyond_scores(lowest: str, highest: str, margin: float) -> Condition:
    """Return a condition: in each of 5 steps one of two metrics is outside the range of the shaped scores by more than
    `margin` times its width. Scores that are all equal have no range."""

    def figures(history: History) -> Figures:
        names = (lowest, highest, *SHAPED_RANGE)
        steps = list(zip(*(history.last(name, 5) for name in names), strict=True))
        is_beyond = []
        for low, high, score_low, score_high in steps:
            room = margin * (score_high - score_low)
            is_beyond.append(room > 0 and (low < score_low - room or high > score_high + room))
        return steps[-1] if all(is_beyond) else ()

    return figures


def pairs_unlearned(history: History) -> Figures:
    accuracy = history.mean("reward_model/accuracy", 20)
    loss = history.mean("reward_model/bt_loss", 20)
    return (accuracy, loss) if accuracy < 0.55 and loss >= history.first("reward_model/bt_loss") else ()


def few_effective_samples(history: History) -> Figures:
    """Hold where the effective sample size is below 80 % of the tokens. With one weight a response the limit is 30 %,
    as in verl: such weights are products over the tokens, so they differ more."""
    correction = history.config.get("algorithm", {}).get("rollout_correction") or {}
    size = history.mean("rollout_is/ess")
    return (size,) if size < (0.3 if correction.get("level") == "sequence" else 0.8) else ()


def beyond_limits(history: History) -> Figures:
    for name, limit in history.config.get("limits", {}).items():
        if (mean := history.mean(name)) > limit:
            return (mean, limit)
    return ()
