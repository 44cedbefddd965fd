"""A summary for the console and report.html, both from the files in a run's folder. Torch-free."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.observe.console import held_out_score
from megappo.observe.files import (
    CHECKPOINTS,
    EVALUATION_FILE,
    HF_ACTOR,
    REPORT_FILE,
    ROLLOUTS_FOLDER,
    TENSORBOARD_FOLDER,
    has_exported,
)
from megappo.observe.health import held_steps
from megappo.observe.loggers import Logger, RunEnd, RunInfo
from megappo.observe.metrics_file import METRICS_FILE, read_metrics
from megappo.observe.report_data import run_data
from megappo.observe.report_page import page
from megappo.observe.report_samples import MOST_CHARACTERS
from megappo.runtime.status import format_seconds

HELD_OUT = re.compile(r"val/(?P<dataset>.+)/mean@\d+")
"""The metric of a held-out data set's mean score over n responses per prompt."""
RECORDS = (METRICS_FILE, TENSORBOARD_FOLDER, ROLLOUTS_FOLDER, CHECKPOINTS)
OUTPUTS = {"evaluation": EVALUATION_FILE, "HF actor": HF_ACTOR}
REPORT_SECONDS = 30.0
"""Least time between two reports of a run that goes on."""
REPORT_SHARE = 0.01
"""Most of a run's time that they may take."""

Steps = Sequence[Mapping[str, Any]]
Points = dict[int, float]
"""Step -> what was measured there."""


class Report(Logger):
    """Writes report.html while a run goes on, now and then, and at its end."""

    def on_start(self, run: RunInfo) -> None:
        """Remove the report of an earlier run."""
        self._output_dir = run.output_dir
        self._due = time.monotonic() + REPORT_SECONDS
        (run.output_dir / REPORT_FILE).unlink(missing_ok=True)

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the report, if it is due: after `REPORT_SECONDS`, or more where it is so large that writing takes more
        than `REPORT_SHARE` of the time."""
        start = time.monotonic()
        if start >= self._due:
            write_report(self._output_dir)
            end = time.monotonic()
            self._due = end + max(REPORT_SECONDS, (end - start) / REPORT_SHARE)

    def on_end(self, end: RunEnd) -> None:
        """Write the last report, with the status that run.json has by now."""
        write_report(self._output_dir)


def summary(folder: Path, steps: Steps, report: Path | None = None) -> str:
    """Return steps, time, held-out score and reward before and after, and where the run's files are.

    Args:
        steps: content of the run's metrics.jsonl.
        report: the one that the end of a run names; the command after it names the exported actor.
    """
    rows = []
    if _has_trained(steps):
        seconds = math.fsum(metrics.get("timing_s/step") or 0.0 for metrics in steps)
        rows.append(("steps", f"{steps[-1]['step']}, {format_seconds(seconds)} h:mm:ss"))
    rows += _first_and_last("held-out score", _held_out(steps))
    evaluation = _last_evaluation(steps)
    rows += [(dataset, _in_words(evaluation, mean)) for dataset, mean in _datasets(evaluation).items()]
    rows += _first_and_last("mean reward", _points(steps, "reward/score/mean"))
    held = [f"{rule} in {len(found)} steps" for rule, found in held_steps(steps).items() if found]
    rows += [("unhealthy", ", ".join(held))] if held else []
    if files := [path for path in RECORDS if (folder / path).exists()]:
        rows.append(("files", f"{folder}: {', '.join(files)}"))
    for name, path in OUTPUTS.items():
        if (folder / path).exists() and (path != HF_ACTOR or (report is None and has_exported(folder))):
            rows.append((name, str(folder / path)))
    if report is not None:
        rows.append(("report", str(report)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def write_report(output_dir: str | Path) -> Path:
    """Write `report.html`, one self-contained page, from the files in a run's folder.

    Raises:
        ConfigError: metrics.jsonl or config.yaml is damaged.
    """
    folder = Path(output_dir)
    path, steps = folder / REPORT_FILE, read_metrics(folder)
    data = run_data(folder, steps, MOST_CHARACTERS)
    content = page("/".join(folder.resolve().parts[-2:]), [data], summary(folder, steps))
    partial = path.with_suffix(".tmp")
    partial.write_bytes(content)
    partial.replace(path)
    return path


def _has_trained(steps: Steps) -> bool:
    """Return whether a step was trained, rather than only an evaluation run."""
    return any("timing_s/step" in metrics for metrics in steps)


def _points(steps: Steps, name: str) -> Points:
    return {metrics["step"]: metrics[name] for metrics in steps if metrics.get(name) is not None}


def _held_out(steps: Steps) -> Points:
    scores = {metrics["step"]: held_out_score(metrics) for metrics in steps}
    return {step: score for step, score in scores.items() if score is not None}


def _first_and_last(name: str, points: Points) -> list[tuple[str, str]]:
    shown = [f"{points[step]:.3f} (step {step})" for step in dict.fromkeys([*points][:1] + [*points][-1:])]
    return [(name, " -> ".join(shown))] if shown else []


def _last_evaluation(steps: Steps) -> Mapping[str, Any]:
    """Return the metrics of the last step with an evaluation; {} if there is none."""
    return next((metrics for metrics in reversed(steps) if _datasets(metrics)), {})


def _datasets(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return held-out data set -> its metric of HELD_OUT."""
    matches = filter(None, map(HELD_OUT.fullmatch, metrics))
    return {match["dataset"]: match[0] for match in matches}


def _in_words(metrics: Mapping[str, Any], mean: str) -> str:
    """Return a data set's mean@n, pass@n and maj@n."""
    numbers = []
    for kind in ("mean", "pass", "maj"):
        name = mean.replace("/mean@", f"/{kind}@")
        if metrics.get(name) is not None:
            half_width = metrics.get(f"{name}/ci95")
            interval = f" +- {half_width:.3f}" if half_width else ""
            numbers.append(f"{name.rpartition('/')[2]} {metrics[name]:.3f}{interval}")
    return ", ".join(numbers)
