"""The results of each held-out data set in a step's metrics, for people to read."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_METRIC = re.compile(r"val/(?P<dataset>.+)/(?P<name>(?P<kind>[a-z]+)@(?P<k>\d+))(?P<half>/ci95)?")


class Estimate(NamedTuple):
    """A number, and half the width of its 95 % confidence interval; None where it has none."""

    value: float
    half_width: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.3f}" + (f" +- {self.half_width:.3f}" if self.half_width is not None else "")


def evaluation_of(metrics: Mapping[str, Any]) -> dict[str, dict[str, Estimate]]:
    """Data set -> mean@n, pass@k and so on, in the step's order; {} of a step without evaluation."""
    found: dict[str, dict[str, Estimate]] = {}
    for key, value in metrics.items():
        match = _METRIC.fullmatch(key)
        if match and not match["half"] and value is not None:
            found.setdefault(match["dataset"], {})[match["name"]] = Estimate(value, metrics.get(f"{key}/ci95"))
    return found


def mean_of(estimates: Mapping[str, Estimate]) -> tuple[str, Estimate]:
    """mean@n of a data set, with its name."""
    return next((name, estimate) for name, estimate in estimates.items() if name.startswith("mean@"))


def in_words(estimates: Mapping[str, Estimate]) -> str:
    """Return a data set's mean@n and, with several responses per prompt, pass@n and maj@n, in one line."""
    name, _ = mean_of(estimates)
    n = name.partition("@")[2]
    shown = [name] if n == "1" else [f"{kind}@{n}" for kind in ("mean", "pass", "maj")]
    return ", ".join(f"{one} {estimates[one]}" for one in shown if one in estimates)
