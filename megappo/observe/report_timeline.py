"""Phases of the last steps on each rank, as the report draws them. Torch-free."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megappo.observe.timeline import rank_files

NUM_STEPS, NUM_RANKS = 40, 64
"""Most steps and ranks that are shown."""
TAIL_BYTES = 2**17
"""Bytes at the end of a rank's file that are read."""
EXCHANGES = ("scatter", "gather", "advantages", "scatter_fields", "gather_metrics")
"""Phases in which all ranks exchange rows or numbers: those that arrive early wait in them for the last."""

Span = tuple[str, float, float]
"""Phase, start in seconds since the first one shown, seconds."""


def recent_timeline(folder: Path) -> dict[int, dict[int, list[Span]]]:
    """Return step -> rank -> its outermost phases; {} for a run that has recorded none."""
    timeline: dict[int, dict[int, list[Span]]] = defaultdict(dict)
    files = list(rank_files(folder).items())
    stride = -(-len(files) // NUM_RANKS)
    for rank, path in files[:: stride or 1]:
        for line in _last_lines(path):
            timeline[line["step"]][rank] = [span for span in line["phases"] if "/" not in span[0]]
    steps = sorted(timeline)[-NUM_STEPS:]
    starts = [span[1] for step in steps for spans in timeline[step].values() for span in spans]
    first = min(starts, default=0.0)
    return {step: {rank: _since(first, spans) for rank, spans in timeline[step].items()} for step in steps}


def _since(first: float, spans: list[Span]) -> list[Span]:
    return [(phase, round(start - first, 4), round(seconds, 4)) for phase, start, seconds in spans]


def _last_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the last whole lines, from NUM_STEPS on."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - TAIL_BYTES, 0))
        lines = file.read().split(b"\n")[:-1]
    is_cut = size > TAIL_BYTES
    for line in lines[is_cut:][-NUM_STEPS:]:
        yield json.loads(line)
