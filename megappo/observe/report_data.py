"""Content of a run's report, as JSON has it: facts, curves, responses and configuration. Torch-free."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from megappo.config.config_error import show
from megappo.config.describe import declared, keys
from megappo.config.loading import leaves, read_values
from megappo.observe.files import CONFIG_FILE
from megappo.observe.health import RULES, held_steps
from megappo.observe.report_samples import report_samples
from megappo.observe.run_file import RunFacts, read_run
from megappo.observe.timeline import Interval, read_timeline

LONGEST_CURVE = 1000
"""Points of a curve; of a longer run several steps become one point."""
NUM_STEPS, NUM_RANKS = 40, 64
"""Most steps and ranks of the timeline."""
TAIL_BYTES = 2**16
"""Bytes at the end of a rank's file that are read for it."""
EXCHANGES = ("scatter", "gather", "advantages", "scatter_fields", "gather_metrics")
"""Phases in which all ranks exchange rows or numbers: those that arrive early wait in them for the last."""
OF_A_RUN = ("trainer.seed", "trainer.output_dir")
"""Keys by which runs that are alike may differ."""


def run_data(name: str, folder: Path, steps: Sequence[Mapping[str, Any]], most_characters: int) -> dict[str, Any]:
    """Return the content of a run's report, from the files in its folder.

    Args:
        name: under which the page shows the run.
        steps: content of its metrics.jsonl.
        most_characters: of JSON that its responses may take.
    Raises:
        ConfigError: config.yaml is damaged.
    """
    facts, changed = read_run(folder), differences(folder)
    return {
        **{fact: facts[fact] for fact in RunFacts.model_fields},
        "name": name,
        "alike": show([row for row in changed if row[0] not in OF_A_RUN]) if changed else name,
        "seconds": math.fsum(metrics.get("timing_s/step") or 0.0 for metrics in steps),
        **curves(steps),
        "exchanges": EXCHANGES,
        "timeline": recent_timeline(folder),
        "health": [rule_summary(name, held) for name, held in held_steps(steps).items()],
        "samples": report_samples(folder, most_characters),
        "differences": changed,
    }


def rule_summary(name: str, steps: list[int]) -> dict[str, Any]:
    """Return a health rule in words, and the steps in which it held."""
    rule = RULES[name]
    return {"name": name, "meaning": rule.meaning, "remedy": rule.remedy, "page": rule.page, "steps": steps}


def curves(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `steps`, and `metrics`: name -> a value or None for each of them.

    Where there are more steps than a curve has points, a point is the mean of several steps, of a maximum or minimum
    the largest or smallest.
    """
    size = math.ceil(len(steps) / LONGEST_CURVE) or 1
    bins = [steps[start : start + size] for start in range(0, len(steps), size)]
    names = {name: None for metrics in steps for name in metrics if name != "step"}
    table = {name: [_point(name, several) for several in bins] for name in names}
    return {"steps": [several[-1]["step"] for several in bins], "metrics": table}


def _point(name: str, steps: Sequence[Mapping[str, Any]]) -> float | None:
    values = [metrics[name] for metrics in steps if metrics.get(name) is not None]
    if not values:
        return None
    reduce = {"max": max, "min": min}.get(name.rpartition("/")[2], statistics.fmean)
    return float(f"{reduce(values):.5g}")


def recent_timeline(folder: Path) -> dict[int, dict[int, list[Interval]]]:
    """Return step -> rank -> its outermost phases, from the start of the first one on; {} if the run recorded none."""
    timeline = read_timeline(folder, NUM_RANKS, TAIL_BYTES)
    recent = {step: timeline[step] for step in list(timeline)[-NUM_STEPS:]}
    first = math.inf
    for ranks in recent.values():
        for rank, phases in ranks.items():
            ranks[rank] = [phase for phase in phases if "/" not in phase.name]
            first = min([first, *(phase.start for phase in ranks[rank])])
    for ranks in recent.values():
        for rank, phases in ranks.items():
            ranks[rank] = [Interval(name, round(start - first, 4), round(s, 4)) for name, start, s in phases]
    return recent


def differences(folder: Path) -> list[list[str]]:
    """Return key, value and default of each config key that the run has set to something else."""
    file = folder / CONFIG_FILE
    defaults = {key.path: key.default for key in keys()}
    rows = []
    for path, value in leaves(read_values(file)) if file.is_file() else ():
        default = defaults.get(declared(path), PydanticUndefined)
        if default is PydanticUndefined:
            rows.append([path, show(value), "none"])
        elif value != to_jsonable_python(default):
            rows.append([path, show(value), show(default)])
    return rows
