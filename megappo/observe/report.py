"""The end of a run: a summary for the console and report.html, both read from metrics.jsonl."""

import html
import math
import re
from pathlib import Path
from typing import Any

from megappo.observe.charts import Points, line_chart, share_bar
from megappo.observe.console import format_seconds, held_out_score
from megappo.observe.evaluations import Estimate, evaluation_of, in_words, mean_of
from megappo.observe.files import CHECKPOINTS, EVALUATION_FILE, HF_ACTOR, REPORT_FILE, has_exported
from megappo.observe.metrics import METRICS_FILE, TENSORBOARD_FOLDER, read_metrics
from megappo.observe.sample_pages import sample_sections
from megappo.observe.samples import ROLLOUTS_FOLDER, read_samples

_REWARD = "reward/score/mean"
_HELD_OUT_SCORE = re.compile("val/.*/score/mean")
_SCORE_AND_PASSED = ("/score/mean", "/pass@1")
_OUTPUTS = (
    ("evaluation", EVALUATION_FILE),
    ("metrics", METRICS_FILE),
    ("tensorboard", TENSORBOARD_FOLDER),
    ("samples", ROLLOUTS_FOLDER),
    ("checkpoints", CHECKPOINTS),
    ("HF actor", HF_ACTOR),
)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --ink: #1f2328; --dim: #59636e; --grid: #d8dee4; --paper: #ffffff; --line: #0969da }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6edf3; --dim: #9198a1; --grid: #30363d; --paper: #0d1117; --line: #4493f8 }}
}}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 760px;
  margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.3rem }} h2 {{ font-size: 1rem; margin: 2rem 0 .3rem }} pre {{ overflow-x: auto }}
svg {{ width: 100%; height: auto; display: block }}
svg text {{ font: 12px system-ui, sans-serif; fill: var(--dim) }}
.grid {{ stroke: var(--grid) }} .line {{ stroke: var(--line); fill: none; stroke-width: 2 }}
.dot {{ fill: var(--line) }} .band {{ fill: var(--line); opacity: .18 }}
table {{ border-collapse: collapse }} td, th {{ padding: .1rem .8rem .1rem 0; text-align: left }}
details {{ margin: .3rem 0 }} summary {{ cursor: pointer; overflow-wrap: anywhere }}
details pre {{ white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--grid);
  padding-left: .8rem }}
.right {{ color: #1a7f37 }} .wrong {{ color: #cf222e }}
</style></head><body><h1>{title}</h1>
<pre>{summary}</pre>
{sections}
</body></html>
"""


def summary(output_dir: str | Path, report: Path | None = None) -> str:
    """Steps, time, held-out accuracy and reward before and after, and where the run's files are."""
    folder = Path(output_dir)
    steps = read_metrics(folder)
    seconds = math.fsum(metrics.get("timing_s/step") or 0.0 for metrics in steps)
    last_step = steps[-1]["step"] if steps else 0
    rows = [("steps", f"{last_step}, {format_seconds(seconds)} h:mm:ss")] if _has_trained(steps) else []
    rows += _before_and_after(_held_out_title(steps), _held_out(steps))
    rows += [(name, in_words(estimates)) for name, estimates in _last_evaluation(steps).items()]
    rows += _before_and_after("mean reward", _points(steps, _REWARD))
    outputs = [(name, folder / path) for name, path in _OUTPUTS if path != HF_ACTOR or has_exported(folder)]
    rows += [(name, str(path)) for name, path in outputs if path.exists()]
    rows += [("report", str(report))] if report else []
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def write_report(output_dir: str | Path) -> Path:
    """Write `report.html`, self-contained: curves of held-out scores and reward, what a step's time went to, and a few
    responses of the last evaluation."""
    folder = Path(output_dir)
    steps = read_metrics(folder)
    sections = [
        _section(_held_out_title(steps).capitalize(), line_chart(_held_out(steps))),
        *(_section(f"Held out: {name}", _data_set(steps, name)) for name in _last_evaluation(steps)),
        *(_training(steps) if _has_trained(steps) else ()),
        *sample_sections(read_samples(folder)),
    ]
    path = folder / REPORT_FILE
    title = html.escape(f"PPO run: {folder.resolve().name}")
    page = _PAGE.format(title=title, summary=html.escape(summary(folder)), sections="\n".join(sections))
    path.write_text(page, encoding="utf-8")
    return path


def _section(title: str, chart: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{chart}"


def _has_trained(steps: list[dict[str, Any]]) -> bool:
    """Return whether a step was trained, rather than only an evaluation run."""
    return any("timing_s/step" in metrics for metrics in steps)


def _training(steps: list[dict[str, Any]]) -> list[str]:
    return [
        _section("Mean reward of the training rollouts", line_chart(_points(steps, _REWARD))),
        _section("Where the time of a step went", share_bar(_phase_seconds(steps))),
    ]


def _data_set(steps: list[dict[str, Any]], name: str) -> str:
    """Return a data set's curve with its confidence band, and all results of its last evaluation."""
    found = [(metrics["step"], evaluation_of(metrics).get(name)) for metrics in steps]
    means = [(step, mean_of(estimates)[1]) for step, estimates in found if estimates]
    half_widths = {step: mean.half_width for step, mean in means if mean.half_width is not None}
    chart = line_chart([(step, mean.value) for step, mean in means], half_widths)
    cells = [f"<tr><td>{key}</td><td>{one}</td></tr>" for key, one in _last_evaluation(steps)[name].items()]
    caption = f"at step {means[-1][0]}, +- half of the 95 % confidence interval"
    return f"{chart}\n<details><summary>{caption}</summary><table>{''.join(cells)}</table></details>"


def _last_evaluation(steps: list[dict[str, Any]]) -> dict[str, dict[str, Estimate]]:
    return next(filter(None, map(evaluation_of, reversed(steps))), {})


def _before_and_after(name: str, points: Points) -> list[tuple[str, str]]:
    if not points:
        return []
    (first_step, first), (last_step, last) = points[0], points[-1]
    if len(points) == 1:
        return [(name, f"{first:.3f} (step {first_step})")]
    return [(name, f"{first:.3f} (step {first_step}) -> {last:.3f} (step {last_step})")]


def _held_out(steps: list[dict[str, Any]]) -> Points:
    return [(metrics["step"], value) for metrics in steps if (value := held_out_score(metrics)) is not None]


def _held_out_title(steps: list[dict[str, Any]]) -> str:
    """The mean score is the share of right answers where it is the share that passes, in every evaluation."""
    pairs = [
        (value, metrics.get(name.replace(*_SCORE_AND_PASSED)))
        for metrics in steps
        for name, value in metrics.items()
        if _HELD_OUT_SCORE.fullmatch(name) is not None and value is not None
    ]
    is_share = all(passed is not None and math.isclose(score, passed, abs_tol=1e-6) for score, passed in pairs)
    return "held-out accuracy" if is_share else "held-out score"


def _points(steps: list[dict[str, Any]], name: str) -> Points:
    return [(metrics["step"], metrics[name]) for metrics in steps if metrics.get(name) is not None]


def _phase_seconds(steps: list[dict[str, Any]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for metrics in steps:
        for name, value in metrics.items():
            phase = name.removeprefix("timing_s/")
            if phase != name and phase != "step" and "/" not in phase:
                totals[phase] = totals.get(phase, 0.0) + value
    return totals
