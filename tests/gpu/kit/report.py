"""Turn results.json of run.py into the tables of docs/clusters.md.

.venv/bin/python tests/gpu/kit/report.py outputs/gpu-kit/results/results.json
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path


def lines(found: dict) -> Iterator[str]:
    """Yield the report: what ran where, then a table for each whole run and one of the other stages' figures."""
    devices = {stage["figures"]["device"] for stage in found["stages"] if "figures" in stage}
    yield f"Measured on {', '.join(sorted(devices)) or 'an unknown device'} at commit {found['commit']}, {found['date']}."
    yield from ("", "| stage | result | seconds |", "| --- | --- | --- |")
    for stage in found["stages"]:
        yield f"| {stage['stage']} | {'passed' if stage['rc'] == 0 else f'failed ({stage["rc"]})'} | {stage['seconds']} |"
    for stage in found["stages"]:
        figures = stage.get("figures", {})
        if any(name.startswith("timing_s/") for name in figures):
            yield from phases(stage["stage"], figures)
        elif figures:
            numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
            yield from ("", f"| {stage['stage']} | measured |", "| --- | --- |")
            yield from (f"| {name} | {value:,.4g} |" for name, value in numbers.items())


def phases(title: str, figures: dict) -> Iterator[str]:
    """Yield a whole run's last step: each phase's seconds, and its peak of memory beside the plan's."""
    yield from ("", f"| {title} | seconds | peak GiB | planned GiB |", "| --- | --- | --- | --- |")
    for name, seconds in figures.items():
        kind, _, phase = name.partition("/")
        if kind == "timing_s":
            peak, planned = figures.get(f"memory/{phase}_peak_gib"), figures.get(f"planned/{phase}_gib")
            yield f"| {phase} | {seconds:.3f} | {number(peak)} | {number(planned)} |"
    others = {
        name: value for name, value in figures.items() if not name.startswith(("timing_s/", "memory/", "planned/"))
    }
    yield from ("", "| figure | value |", "| --- | --- |")
    yield from (f"| {name} | {value:,.4g} |" for name, value in others.items() if isinstance(value, int | float))


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(sys.argv[1]).read_text()))))
