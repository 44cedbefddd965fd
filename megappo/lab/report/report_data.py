"""Content of a run's report, as JSON has it: facts, curves, responses and configuration. Torch-free."""

import math
import statistics
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from megappo.config.config_error import show
from megappo.config.describe import declared, keys
from megappo.config.loading import leaves
from megappo.lab.report.health import RULES
from megappo.lab.report.report_samples import report_samples
from megappo.observe.findings import Steps, held_steps
from megappo.observe.run_file import RunFacts, config_of, read_run
from megappo.observe.timeline import Timeline, read_timeline

LONGEST_CURVE = 1002
"""Points of a curve; of a longer run several steps become one point."""
REDUCTIONS = (min, statistics.fmean, max, len)
DIGITS = 7
"""Significant digits of a value: a float32 has as many."""
NUM_STEPS, NUM_RANKS = 40, 64
"""Most steps and ranks of the timeline."""
TAIL_BYTES = 2**16
"""Bytes at the end of a rank's file that are read for it."""
EXCHANGES = ("scatter", "gather", "advantages", "scatter_fields", "gather_metrics")
"""Phases in which all ranks exchange rows or numbers: ranks that arrive early wait in them for the last."""
OF_A_RUN = ("trainer.seed", "trainer.output_dir")
"""Keys by which runs that are alike may differ."""


def run_data(name: str, folder: Path, steps: Steps, most_characters: int) -> dict[str, Any]:
    """Return the content of a run's report, from the files in its folder.

    Args:
        name: name under which the page shows the run.
        steps: content of its metrics.jsonl.
        most_characters: characters of JSON that its responses may take.
    Raises:
        ConfigError: config.yaml is damaged.
    """
    facts, changed, held = read_run(folder), differences(folder), held_steps(steps)
    health = [
        {"name": rule_name, "meaning": rule.meaning, "remedy": rule.remedy, "page": rule.page, "steps": held[rule_name]}
        for rule_name, rule in RULES.items()
        if rule_name in held
    ]
    return {
        **{fact: facts[fact] for fact in RunFacts.model_fields},
        "name": name,
        "alike": show([row for row in changed if row[0] not in OF_A_RUN]) if changed else name,
        "seconds": math.fsum(metrics.get("timing_s/step") or 0.0 for metrics in steps),
        **curves(steps),
        "exchanges": EXCHANGES,
        "timeline": recent_timeline(folder),
        "health": health,
        "samples": report_samples(folder, most_characters),
        "differences": changed,
    }


def curves(steps: Steps) -> dict[str, Any]:
    """Return the curves of a run.

    Returns:
        `size`, the steps of a point, a power of 2; `steps`, the first and the last step of each point; `metrics`, name
        -> what `_point` returns for each of them; `ends`, name -> step and value of the first and the last step that
        has one.
    """
    size = 1 << (len(steps) // LONGEST_CURVE).bit_length()
    points = [list(several) for _, several in groupby(steps, lambda metrics: metrics["step"] // size)]
    names = {name: None for metrics in steps for name in metrics if name != "step"}
    known = {name: [metrics for metrics in steps if metrics.get(name) is not None] for name in names}
    ends = {name: [(at["step"], at[name]) for at in (*found[:1], *found[-1:])] for name, found in known.items()}
    table = {name: [_point(name, several) for several in points] for name in names}
    return {"size": size, "steps": [(at[0]["step"], at[-1]["step"]) for at in points], "metrics": table, "ends": ends}


def _point(name: str, steps: Steps) -> float | list[float] | None:
    """Return the value of a metric in these steps: of several their lowest, mean, highest, and their number."""
    values = [metrics[name] for metrics in steps if metrics.get(name) is not None]
    numbers = [float(f"{reduce(values):.{DIGITS}g}") for reduce in REDUCTIONS if values]
    return numbers if values[1:] else next(iter(numbers), None)


def recent_timeline(folder: Path) -> Timeline:
    """Return step -> rank -> its phases, of the last steps; {} if the run recorded none."""
    timeline = read_timeline(folder, NUM_RANKS, TAIL_BYTES)
    return {step: timeline[step] for step in list(timeline)[-NUM_STEPS:]}


def differences(folder: Path) -> list[list[str]]:
    """Return key, value and default of each config key that the run has set to something else."""
    defaults = {key.path: key.default for key in keys()}
    rows = []
    for path, value in leaves(config_of(folder)):
        default = defaults.get(declared(path), PydanticUndefined)
        if default is PydanticUndefined:
            rows.append([path, show(value), "none"])
        elif value != to_jsonable_python(default):
            rows.append([path, show(value), show(default)])
    return rows
