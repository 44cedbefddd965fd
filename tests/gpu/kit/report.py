"""Print the results.json of one or more calls of run.py as Markdown tables, for docs/clusters.md.

.venv/bin/python tests/gpu/kit/report.py outputs/gpu-kit/results/results.json [...]
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

APART = ("timing_s/", "memory/", "planned/")
"""Figures of a whole run that are in its table of phases."""


def lines(found: dict) -> Iterator[str]:
    """Yield the report: device and commit, the stages' results, then a table for each stage."""
    devices = sorted({stage["figures"]["device"] for stage in found["stages"] if "figures" in stage})
    yield f"Measured on {', '.join(devices) or 'an unknown device'} at commit {found['commit']}, {found['date']}."
    yield from table("stage", "result", "seconds")
    for stage in found["stages"]:
        outcome = "passed" if stage["rc"] == 0 else f"failed with exit code {stage['rc']}"
        yield row(stage["stage"], outcome, stage["seconds"])
    for stage in found["stages"]:
        figures = stage.get("figures", {})
        if any(name.startswith("timing_s/") for name in figures):
            yield from phases(stage["stage"], figures)
        yield from numbers(stage["stage"], figures)


def phases(title: str, figures: dict) -> Iterator[str]:
    """Yield the phases of a whole run's last step: seconds, peak memory, and the memory that the plan expects."""
    yield from table(title, "seconds", "peak GiB", "planned GiB")
    for name, seconds in figures.items():
        if name.startswith("timing_s/"):
            phase = name.removeprefix("timing_s/")
            peak, planned = figures.get(f"memory/{phase}_peak_gib"), figures.get(f"planned/{phase}_gib")
            yield row(phase, f"{seconds:.3f}", gib(peak), gib(planned))


def numbers(title: str, figures: dict) -> Iterator[str]:
    """Yield the other figures that are single numbers."""
    found = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    shown = {name: value for name, value in found.items() if not name.startswith(APART)}
    if shown:
        yield from table(title, "measured")
        yield from (row(name, f"{value:,.4g}") for name, value in shown.items())


def table(*titles: str) -> Iterator[str]:
    yield from ("", row(*titles), row(*["---"] * len(titles)))


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def gib(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results.json of run.py")
    first, *others = (json.loads(path.read_text()) for path in parser.parse_args().results)
    for other in others:
        first["stages"] += other["stages"]
    print("\n".join(lines(first)))
