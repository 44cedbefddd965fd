"""Measure what observing costs a step: timers, memory, timeline, health, console, metrics, TensorBoard and report.

    .venv/bin/python tools/bench/observe.py outputs/quickstart/run

Passes the steps of a run that has ended through the same objects as the run did, in a new folder, and counts the
processor's time of all their threads. The kept rollouts count with their share of the run's own time.
"""

import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import yaml
from timed import Row, parser_of, report

from megappo.lab.report.health import health_of
from megappo.lab.report.report import REPORT_SECONDS, REPORT_SHARE, Report, write_report
from megappo.observe.loggers import Outlook, RunEnd, RunInfo
from megappo.observe.metrics import BUCKETS, Histogram
from megappo.observe.metrics_file import read_metrics
from megappo.observe.observer import Observer
from megappo.observe.tensorboard_logger import TensorBoard
from megappo.observe.timeline import append_phases, read_timeline
from megappo.observe.timers import SAMPLE_SECONDS, PhaseMemory, Timers

HISTOGRAMS = ("advantages", "returns", "values", "reward/score", "rollout/response_length", "actor/ratio_of_tokens")
NUM_CHILDREN = 4
"""Processes of an engine, whose memory rank 0 samples, too."""

Steps = Sequence[Mapping[str, Any]]


def processor_seconds(action: Callable[[], object]) -> float:
    """Return the processor's seconds of this process, all threads, during a call."""
    start = time.process_time()
    action()
    return time.process_time() - start


def log_all(folder: Path, config: Mapping[str, Any], steps: Steps) -> None:
    """Log the steps of a run, with as many histograms as one has."""
    histograms = {f"{name}/histogram": Histogram((1.0, 1.0, *[1.0] * (len(BUCKETS) + 1))) for name in HISTOGRAMS}
    outlook = Outlook(monitor=health_of, loggers={"report": Report()})
    observer = Observer(RunInfo(folder, len(steps), config=config), {"tensorboard": TensorBoard()}, outlook)
    with contextlib.redirect_stdout(io.StringIO()):
        for metrics in steps:
            observer.log(metrics["step"], {**metrics, **histograms})
        observer.end(RunEnd("interrupted"))


def time_phases(timers: Timers, num_phases: int) -> None:
    """Time as many empty phases."""
    for number in range(num_phases):
        with timers(f"phase_{number % 20}"):
            pass


def sample_memory(num_times: int) -> None:
    """Sample the memory of this process and of some children."""
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(NUM_CHILDREN)]
    memory = PhaseMemory()
    for _ in range(num_times):
        memory.sample_all()
    for child in children:
        child.kill()
        child.wait()


def costs(run: Path, steps: Steps, step_seconds: float) -> dict[str, float]:
    """Return the seconds that each part of observing takes in a step."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    timeline = read_timeline(run)
    of_run = {
        name: sum(metrics.get(f"timing_s/{name}", 0.0) for metrics in steps) for name in ("keep_rollouts", "step")
    }
    num_phases = sum(name.startswith("timing_s/") for name in steps[-1])
    with tempfile.TemporaryDirectory() as folder:
        logged = processor_seconds(lambda: log_all(Path(folder), config, steps))
        appended = processor_seconds(
            lambda: [append_phases(folder, 0, step, ranks[0]) for step, ranks in timeline.items()]
        )
    reported = processor_seconds(lambda: write_report(run))
    sampled = processor_seconds(lambda: sample_memory(1000)) / 1000
    timers = Timers()
    return {
        "timers": processor_seconds(lambda: time_phases(timers, 50 * num_phases)) / 50,
        "memory": sampled * step_seconds / SAMPLE_SECONDS,
        "timeline": appended / len(timeline),
        "loggers and health": logged / len(steps),
        "report": step_seconds * min(reported / REPORT_SECONDS, REPORT_SHARE),
        "kept rollouts": of_run["keep_rollouts"] / of_run["step"] * step_seconds,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("run", type=Path, help="output folder of a run that has ended")
    parser.add_argument("--step-seconds", type=float, help="of a step, where the run's machine had other work")
    args = parser.parse_args()
    steps = [metrics for metrics in read_metrics(args.run) if "timing_s/step" in metrics]
    step_seconds = args.step_seconds or statistics.median(metrics["timing_s/step"] for metrics in steps)
    found = [costs(args.run, steps, step_seconds) for _ in range(args.repeats)]
    parts = {name: statistics.median(one[name] for one in found) for name in found[0]}
    parts["observing"] = sum(parts.values())
    anchor = f"a step of {step_seconds:.2g} s"
    report([Row(name, took / step_seconds, "at most 0.01", anchor, took) for name, took in parts.items()], args.json)


if __name__ == "__main__":
    main()
