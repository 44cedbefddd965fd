"""A run's output while it trains: one aligned line per step, and a progress bar on a terminal."""

import io
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

HEADER_INTERVAL = 20
KL_PENALTY = "reward/kl_penalty/mean"
"""The distance to the reference; a run with the KL in its loss alone has it as actor/kl_loss."""
_ETA_WINDOW = 10


def held_out_score(metrics: Mapping[str, float | None]) -> float | None:
    """Mean over the held-out data sets of `val/<dataset>/score/mean`; None where the step holds no evaluation.

    With rewards of 0 and 1 (exact match) it is the accuracy.
    """
    scores = [
        value
        for name, value in metrics.items()
        if name.startswith("val/") and name.endswith("/score/mean") and value is not None
    ]
    return statistics.fmean(scores) if scores else None


@dataclass(frozen=True)
class Column:
    """A column of the console line: its title, the metric it shows, its format and width in characters."""

    title: str
    metric: str
    format: str
    width: int

    def cell(self, metrics: Mapping[str, float]) -> str:
        """The metric, right-aligned; a dash where the step has none."""
        value = held_out_score(metrics) if self.metric == "val" else metrics.get(self.metric)
        if value is None and self.metric == KL_PENALTY:
            value = metrics.get("actor/kl_loss")
        return ("-" if value is None else format(value, self.format)).rjust(self.width)


COLUMNS = (
    Column("reward", "reward/score/mean", ".3f", 7),
    Column("val", "val", ".3f", 7),
    Column("ref_kl", KL_PENALTY, "z.4f", 8),
    Column("ppo_kl", "actor/ppo_kl", "z.4f", 8),
    Column("entropy", "actor/entropy", ".3f", 7),
    Column("clipfrac", "actor/pg_clipfrac", ".3f", 8),
    Column("vf_ev", "critic/vf_explained_var", ".3f", 7),
    Column("length", "rollout/response_length/mean", ".1f", 7),
    Column("tok/s", "rollout/tokens_per_second", ".0f", 7),
    Column("step_s", "timing_s/step", ".1f", 7),
)


def escape_unprintable() -> None:
    """From now on stdout escapes what its encoding lacks, as stderr does: nothing that is printed may end a run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class Console:
    """Prints the lines; the bar goes to stderr, and only where that is a terminal, so logs stay clean."""

    def __init__(self, total_steps: int, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._total_steps = total_steps
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._step_width = max(len("step"), 2 * len(str(total_steps)) + 1)
        self._step_seconds: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._lines = 0
        self._bar: tqdm | None = None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a step's line, under a header every 20 lines; ends the progress bar."""
        self.close_bar()
        if self._lines % HEADER_INTERVAL == 0:
            titles = [column.title.rjust(column.width) for column in COLUMNS]
            self.text("  ".join(["step".rjust(self._step_width), *titles, "eta".rjust(8)]))
        self._lines += 1
        cells = [column.cell(metrics) for column in COLUMNS]
        label = f"{step}/{self._total_steps}".rjust(self._step_width)
        self.text("  ".join([label, *cells, self._eta(step, metrics).rjust(8)]))

    def text(self, text: str) -> None:
        """Print a text of any number of lines."""
        self.close_bar()
        print(text, file=self._out, flush=True)

    def progress(self, phase: str, total: int) -> Callable[[int], None]:
        """Start the bar of a phase of `total` items; the returned function moves it to so many."""
        self.close_bar()
        if not self._err.isatty():
            return lambda done: None
        bar = tqdm(total=total, desc=phase, file=self._err, leave=False, dynamic_ncols=True)
        self._bar = bar
        return lambda done: _advance(bar, done)

    def close_bar(self) -> None:
        """Take the bar away, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _eta(self, step: int, metrics: Mapping[str, float]) -> str:
        if "timing_s/step" in metrics:
            self._step_seconds.append(metrics["timing_s/step"])
        if not self._step_seconds:
            return "-"
        return format_seconds(statistics.fmean(self._step_seconds) * (self._total_steps - step))


def format_seconds(seconds: float) -> str:
    """Seconds as H:MM:SS."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _advance(bar: tqdm, done: int) -> None:
    bar.update(done - bar.n)
    if bar.total is not None and bar.n >= bar.total:
        bar.close()
