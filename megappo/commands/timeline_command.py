"""`megappo timeline`: write one trace of the phases of all ranks."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megappo.observe.files import no_run
from megappo.observe.timeline import TIMELINE_FOLDER, read_timeline

TRACE_FILE = "timeline.json"


def main(arguments: Sequence[str]) -> int:
    """Write one trace of a run's ranks; return the process's exit code."""
    description = "Write one trace of a run's phases on all ranks, for https://ui.perfetto.dev or chrome://tracing."
    parser = argparse.ArgumentParser(prog="megappo timeline", description=description)
    parser.add_argument("run", type=Path, help="output folder of a run")
    parser.add_argument("--steps", nargs=2, type=int, metavar=("FIRST", "LAST"), help="these steps only")
    args = parser.parse_args(arguments)
    every = read_timeline(args.run)
    if not every:
        parser.error(no_run(args.run, TIMELINE_FOLDER))
    first, last = args.steps or (0, sys.maxsize)
    timeline = {step: ranks for step, ranks in every.items() if first <= step <= last}
    if not timeline:
        parser.error(f"--steps {first} {last}: {args.run} has the steps {min(every)} to {max(every)}")
    events: list[dict[str, Any]] = []  # in Chrome's format: a process for each rank, times in microseconds
    for rank in sorted(set().union(*timeline.values())):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
    for step, ranks in timeline.items():
        for rank, phases in ranks.items():
            event = {"ph": "X", "pid": rank, "tid": 0, "args": {"step": step}}
            for name, start, seconds in phases:
                events.append(event | {"name": name, "ts": start * 1e6, "dur": seconds * 1e6})
    trace = args.run / TRACE_FILE
    trace.write_text(json.dumps({"traceEvents": events}), "utf-8")
    print(f"wrote {trace}, of {len(timeline)} steps: open it in https://ui.perfetto.dev")
    return 0
