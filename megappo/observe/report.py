"""The end of a run: a summary for the console and report.html, both read from metrics.jsonl."""

import html
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megappo.observe.console import format_seconds, held_out_score
from megappo.observe.files import (
    CHECKPOINTS,
    EVALUATION_FILE,
    HF_ACTOR,
    REPORT_FILE,
    TENSORBOARD_FOLDER,
    has_exported,
)
from megappo.observe.loggers import Logger, RunEnd, RunInfo
from megappo.observe.metrics import METRICS_FILE, read_metrics
from megappo.observe.samples import ROLLOUTS_FOLDER, read_samples, sample_sections

REWARD = "reward/score/mean"
MEAN = re.compile(r"val/(?P<dataset>.+)/mean@\d+")
"""The metric of a held-out data set's mean score over n responses per prompt."""
OUTPUTS = {
    "evaluation": EVALUATION_FILE,
    "metrics": METRICS_FILE,
    "tensorboard": TENSORBOARD_FOLDER,
    "samples": ROLLOUTS_FOLDER,
    "checkpoints": CHECKPOINTS,
    "HF actor": HF_ACTOR,
}
NOTHING = "<p>Nothing was logged.</p>"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.3rem }} h2 {{ font-size: 1rem; margin: 2rem 0 .3rem }} pre {{ overflow-x: auto }}
svg {{ width: 100%; height: 220px; border: solid #8888; border-width: 0 0 1px 1px }}
.line {{ stroke: #0969da; fill: none; stroke-width: 2; vector-effect: non-scaling-stroke }}
.band {{ fill: #0969da; opacity: .2 }}
td {{ padding: .1rem .8rem .1rem 0 }}
details {{ margin: .3rem 0 }} summary {{ cursor: pointer; overflow-wrap: anywhere }}
details pre {{ white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid #8888; padding-left: .8rem }}
.right {{ color: #1a7f37 }} .wrong {{ color: #cf222e }}
</style></head><body><h1>{title}</h1>
<pre>{summary}</pre>
{sections}
</body></html>
"""

Steps = Sequence[Mapping[str, Any]]


class Estimate(NamedTuple):
    """A number, and half the width of its 95 % confidence interval, 0 if it has none."""

    value: float
    half_width: float = 0.0


Points = dict[int, Estimate]
"""Step -> what was measured there."""


class Report(Logger):
    """Writes report.html when a run has finished; where it is, the run has done everything."""

    def on_start(self, run: RunInfo) -> None:
        """Remove the report of an earlier run."""
        self._output_dir = run.output_dir
        (run.output_dir / REPORT_FILE).unlink(missing_ok=True)

    def on_end(self, end: RunEnd) -> None:
        """Write the report of a finished run."""
        if end.status == "finished":
            write_report(self._output_dir)


def summary(output_dir: str | Path, report: Path | None = None) -> str:
    """Return steps, time, held-out score and reward before and after, and where the run's files are."""
    folder = Path(output_dir)
    steps = read_metrics(folder)
    rows = []
    if _has_trained(steps):
        seconds = math.fsum(metrics.get("timing_s/step") or 0.0 for metrics in steps)
        rows.append(("steps", f"{steps[-1]['step']}, {format_seconds(seconds)} h:mm:ss"))
    rows += _first_and_last("held-out score", _held_out(steps))
    evaluation = _last_evaluation(steps)
    rows += [(dataset, _in_words(evaluation, mean)) for dataset, mean in _datasets(evaluation).items()]
    rows += _first_and_last("mean reward", _points(steps, REWARD))
    for name, path in OUTPUTS.items():
        if (folder / path).exists() and (path != HF_ACTOR or has_exported(folder)):
            rows.append((name, str(folder / path)))
    if report is not None:
        rows.append(("report", str(report)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def write_report(output_dir: str | Path) -> Path:
    """Write `report.html`, self-contained: curves of held-out scores and reward, the time of each phase, and a few
    responses of the last evaluation."""
    folder = Path(output_dir)
    steps = read_metrics(folder)
    sections = {"Held-out score": line_chart(_held_out(steps))}
    for dataset, mean in _datasets(_last_evaluation(steps)).items():
        sections[f"Held out: {dataset}"] = line_chart(_points(steps, mean))
    if _has_trained(steps):
        sections["Mean reward of the training rollouts"] = line_chart(_points(steps, REWARD))
        sections["Seconds of each phase"] = _phase_table(steps)
    parts = [f"<h2>{html.escape(title)}</h2>\n{content}" for title, content in sections.items()]
    parts += sample_sections(read_samples(folder))
    title, text = html.escape(f"PPO run: {folder.resolve().name}"), html.escape(summary(folder))
    path = folder / REPORT_FILE
    path.write_text(PAGE.format(title=title, summary=text, sections="\n".join(parts)), encoding="utf-8")
    return path


def line_chart(points: Points) -> str:
    """Return a curve over steps, with a band for the confidence intervals, as SVG in the units of its axes."""
    if not points:
        return NOTHING
    lows = {step: value - half_width for step, (value, half_width) in points.items()}
    highs = {step: value + half_width for step, (value, half_width) in points.items()}
    first, last = min(points), max(points)
    bottom, top = min(lows.values()), max(highs.values())
    curve = [f"{step},{top - value:.6g}" for step, (value, _) in points.items()]  # SVG's y grows downwards
    band = [f"{step},{top - high:.6g}" for step, high in highs.items()]
    band += [f"{step},{top - low:.6g}" for step, low in reversed(lows.items())]
    return (
        f'<svg viewBox="{first} 0 {max(last - first, 1)} {top - bottom or 1:.6g}" preserveAspectRatio="none">'
        f'<polygon class="band" points="{" ".join(band)}"/><polyline class="line" points="{" ".join(curve)}"/></svg>'
        f"<p>Steps {first} to {last}; from {bottom:.4g} at the bottom to {top:.4g} at the top.</p>"
    )


def _phase_table(steps: Steps) -> str:
    """Return the seconds of each phase in all steps."""
    totals: dict[str, float] = defaultdict(float)
    for metrics in steps:
        for name, value in metrics.items():
            phase = name.removeprefix("timing_s/")
            if phase != name and phase != "step" and "/" not in phase:
                totals[phase] += value
    rows = [f"<tr><td>{phase}</td><td>{seconds:,.1f}</td></tr>" for phase, seconds in totals.items()]
    return f"<table>{''.join(rows)}</table>"


def _has_trained(steps: Steps) -> bool:
    """Return whether a step was trained, rather than only an evaluation run."""
    return any("timing_s/step" in metrics for metrics in steps)


def _points(steps: Steps, name: str) -> Points:
    points = {}
    for metrics in steps:
        if metrics.get(name) is not None:
            points[metrics["step"]] = Estimate(metrics[name], metrics.get(f"{name}/ci95") or 0.0)
    return points


def _held_out(steps: Steps) -> Points:
    scores = {metrics["step"]: held_out_score(metrics) for metrics in steps}
    return {step: Estimate(score) for step, score in scores.items() if score is not None}


def _first_and_last(name: str, points: Points) -> list[tuple[str, str]]:
    shown = [f"{points[step].value:.3f} (step {step})" for step in dict.fromkeys([*points][:1] + [*points][-1:])]
    return [(name, " -> ".join(shown))] if shown else []


def _last_evaluation(steps: Steps) -> Mapping[str, Any]:
    """Return the metrics of the last step with an evaluation; {} if there is none."""
    return next((metrics for metrics in reversed(steps) if _datasets(metrics)), {})


def _datasets(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return held-out data set -> its metric MEAN."""
    matches = filter(None, map(MEAN.fullmatch, metrics))
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
