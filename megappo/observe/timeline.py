"""Phases of all ranks over time. Every rank appends its own to a file; `megappo timeline RUN` makes one trace of them.

A line of such a file is {"step": 3, "phases": [["rollout", 1764204000.25, 0.41], ...]}: the name of each phase, its
start in seconds since 1970 by the clock of the rank's node, and its seconds.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field

from megappo.config.config_error import ConfigError
from megappo.config.text_files import json_lines
from megappo.observe.files import files_named, number_of, write_json_lines
from megappo.runtime.durable_files import append

TIMELINE_FOLDER = "timeline"


class Interval(NamedTuple):
    """A phase of a step on one rank; "outer/inner" is a phase within another.

    Attributes:
        start: seconds since 1970.
    """

    name: str
    start: float
    seconds: float


class StepPhases(BaseModel, strict=True, allow_inf_nan=False):
    """A line of a rank's file."""

    step: int = Field(ge=0)
    phases: list[Annotated[tuple[str, float, float], Field(strict=False)]]


Timeline = dict[int, dict[int, list[Interval]]]
"""Step -> rank -> its phases, in the order of their ends."""


def append_phases(output_dir: str | Path, rank: int, step: int, intervals: Sequence[Interval]) -> None:
    """Append a rank's phases of a step to its file.

    A checkpoint written after a step counts in the next one, as in `timing_s/save`.
    """
    path = Path(output_dir, TIMELINE_FOLDER, f"rank_{rank:05d}.jsonl")
    phases = [[name, round(start, 6), round(seconds, 6)] for name, start, seconds in intervals]
    append(path, json.dumps({"step": step, "phases": phases}) + "\n")


def drop_phases(output_dir: str | Path, resume_step: int) -> None:
    """Remove what an earlier run, of any number of ranks, left of `resume_step` and later. A damaged file is renamed,
    with a warning: nothing but the timeline needs it."""
    for path in _rank_files(output_dir):
        try:
            earlier = json_lines(path, StepPhases.model_validate, f"it is now {path.name}.damaged")
        except ConfigError as error:
            print(f"WARNING: the timeline begins again: {error}", flush=True)
            path.rename(path.with_name(f"{path.name}.damaged"))
            continue
        write_json_lines(path, (line for line in earlier if line["step"] < resume_step))


def read_timeline(output_dir: str | Path, most_ranks: int = sys.maxsize, last_bytes: float = math.inf) -> Timeline:
    """Return the phases of all ranks, without a last line of a rank that a kill cut short; {} without any.

    Args:
        most_ranks: ranks that are read; of more ranks, only every second, third, ... is read.
        last_bytes: read the last steps alone, from this number of bytes at the end of a rank's file.
    """
    timeline: Timeline = defaultdict(dict)
    files = _rank_files(output_dir)
    stride = -(-len(files) // most_ranks) or 1
    for path in files[::stride]:
        for line in json_lines(path, StepPhases.model_validate, "remove the file", last_bytes):
            timeline[line["step"]][number_of(path)] = [Interval(*phase) for phase in line["phases"]]
    return dict(sorted(timeline.items()))


def _rank_files(output_dir: str | Path) -> list[Path]:
    return files_named(Path(output_dir, TIMELINE_FOLDER), "rank", ending="jsonl")
