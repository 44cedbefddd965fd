"""The result of a run in a few lines: on the console at its end, and in its report without JavaScript. Torch-free."""

import math
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from megappo.observe.console import held_out_score
from megappo.observe.files import CHECKPOINTS, EVALUATION_FILE, ROLLOUTS_FOLDER, TENSORBOARD_FOLDER
from megappo.observe.findings import LoggedMetrics, Steps, held_steps
from megappo.observe.metrics_file import METRICS_FILE
from megappo.observe.run_file import exported_model
from megappo.runtime.status import format_score, format_seconds

REWARD = "reward/score/mean"
LOSSES = ("actor/nll_loss", "reward_model/bt_loss")
HELD_OUT = re.compile(r"val/(?P<dataset>.+)/mean@\d+")
"""The metric of a held-out data set's mean score over n responses per prompt."""
EXPLAINED = re.compile(r"val/[^/]+/critic/vf_explained_var")
"""The metric of a critic that is trained alone; see `trainer.value_metrics`."""
RECORDS = (METRICS_FILE, TENSORBOARD_FOLDER, ROLLOUTS_FOLDER, CHECKPOINTS)

Rows = list[tuple[str, str]]
"""Names and what is shown beside them."""


def summary(folder: Path, steps: Steps, report: Path | None = None) -> str:
    """Return steps, time, held-out score and reward before and after, and where the run's files are.

    Args:
        steps: content of the run's metrics.jsonl.
        report: the one that the end of a run names; the line after it names the exported model.
    """
    rows: Rows = []
    if any("timing_s/step" in metrics for metrics in steps):  # else it has only been evaluated
        seconds = math.fsum(metrics.get("timing_s/step") or 0.0 for metrics in steps)
        rows.append(("steps", f"{steps[-1]['step']}, {format_seconds(seconds)} h:mm:ss"))
    rows += _first_and_last("held-out score", steps, list(map(held_out_score, steps)))
    rows += _last_evaluation(steps)
    critic = next(filter(EXPLAINED.fullmatch, chain.from_iterable(steps)), "")
    rows += _first_and_last("explained variance", steps, [metrics.get(critic) for metrics in steps])
    for metric in ("accuracy", "loss"):
        rows += _first_and_last(f"held-out {metric}", steps, [held_out_score(metrics, metric) for metrics in steps])
    for loss in LOSSES:
        rows += _first_and_last("loss", steps, [metrics.get(loss) for metrics in steps])
    rows += _first_and_last("mean reward", steps, [metrics.get(REWARD) for metrics in steps])
    if held := [f"{rule} in {len(found)} steps" for rule, found in held_steps(steps).items() if found]:
        rows.append(("unhealthy", ", ".join(held)))
    if files := [path for path in RECORDS if (folder / path).exists()]:
        rows.append(("files", f"{folder}: {', '.join(files)}"))
    if (folder / EVALUATION_FILE).exists():
        rows.append(("evaluation", str(folder / EVALUATION_FILE)))
    exported = exported_model(folder)
    if report is None and exported is not None:
        rows.append((exported.name.replace("hf_", "HF "), str(exported)))
    if report is not None:
        rows.append(("report", str(report)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def _first_and_last(name: str, steps: Steps, values: Sequence[float | None]) -> Rows:
    """Return a row of the first and the last of the steps' values, if there is any."""
    known = [(metrics["step"], value) for metrics, value in zip(steps, values, strict=True) if value is not None]
    ends = known[:1] + known[1:][-1:]
    return [(name, " -> ".join(f"{format_score(value)} (step {step})" for step, value in ends))] if ends else []


def _last_evaluation(steps: Steps) -> Rows:
    """Return a row for each data set of the last evaluation: its mean@n, pass@n and maj@n."""
    for metrics in reversed(steps):
        if found := [match for match in map(HELD_OUT.fullmatch, metrics) if match]:
            return [(match["dataset"], _in_words(metrics, match[0])) for match in found]
    return []


def _in_words(metrics: LoggedMetrics, mean: str) -> str:
    numbers = []
    for kind in ("mean", "pass", "maj"):
        name = mean.replace("/mean@", f"/{kind}@")
        if metrics.get(name) is not None:
            half_width = metrics.get(f"{name}/ci95")
            interval = f" +- {format_score(half_width)}" if half_width else ""
            numbers.append(f"{name.rpartition('/')[2]} {format_score(metrics[name])}{interval}")
    return ", ".join(numbers)
