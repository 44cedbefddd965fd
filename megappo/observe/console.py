"""A run's output while it trains: one aligned line per step, and a progress bar on a terminal."""

import io
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from megappo.observe.loggers import Logger, RunEnd
from megappo.observe.samples import format_samples

HEADER_INTERVAL = 20
ETA_STEPS = 10
"""The last steps whose mean time estimates the remaining ones."""


def held_out_score(metrics: Mapping[str, float | None]) -> float | None:
    """Return the mean over the held-out data sets of `val/<dataset>/score/mean`; None where the step holds no
    evaluation.

    With rewards of 0 and 1 (exact match) it is the accuracy.
    """
    scores = []
    for name, value in metrics.items():
        if name.startswith("val/") and name.endswith("/score/mean") and value is not None:
            scores.append(value)
    return statistics.fmean(scores) if scores else None


KL_PENALTY = "reward/kl_penalty/mean"
COLUMNS = {
    "reward": ("reward/score/mean", ".3f"),
    "val": ("val", ".3f"),
    "ref_kl": (KL_PENALTY, "z.4f"),
    "ppo_kl": ("actor/ppo_kl", "z.4f"),
    "entropy": ("actor/entropy", ".3f"),
    "clipfrac": ("actor/pg_clipfrac", ".3f"),
    "vf_ev": ("critic/vf_explained_var", ".3f"),
    "length": ("rollout/response_length/mean", ".1f"),
    "tok/s": ("rollout/tokens_per_second", ".0f"),
    "step_s": ("timing_s/step", ".1f"),
}
"""Title -> the metric that the column shows, and its format."""
COLUMN_WIDTH = 8
"""Characters of a number, or of its title."""


def escape_unprintable() -> None:
    """From now on stdout escapes what its encoding lacks, as stderr does: nothing that is printed may end a run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class Console(Logger):
    """Prints the lines; the bar goes to stderr, and only where that is a terminal, so logs stay clean."""

    def __init__(self, total_steps: int, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._total_steps = total_steps
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._step_width = max(len("step"), 2 * len(str(total_steps)) + 1)
        self._step_seconds: deque[float] = deque(maxlen=ETA_STEPS)
        self._lines = 0
        self._bar: tqdm | None = None

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print a step's line, under a header every 20 lines; ends the progress bar."""
        if self._lines % HEADER_INTERVAL == 0:
            self._line("step", *COLUMNS, "eta")
        self._lines += 1
        # A run with the KL in its loss alone has the distance to the reference as actor/kl_loss.
        values = {"val": held_out_score(metrics), KL_PENALTY: metrics.get("actor/kl_loss"), **metrics}
        cells = []
        for metric, number_format in COLUMNS.values():
            value = values.get(metric)
            cells.append("-" if value is None else format(value, number_format))
        self._line(f"{step}/{self._total_steps}", *cells, self._eta(step, metrics))

    def on_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Print the samples."""
        self.text(format_samples(step, samples))

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Print the checkpoint's path."""
        self.text(f"checkpoint {path}")

    def on_end(self, end: RunEnd) -> None:
        """Take the progress bar away."""
        self.close_bar()

    def _line(self, step: str, *cells: str) -> None:
        self.text("  ".join([step.rjust(self._step_width), *(cell.rjust(COLUMN_WIDTH) for cell in cells)]))

    def text(self, text: str) -> None:
        """Print a text of any number of lines."""
        self.close_bar()
        print(text, file=self._out, flush=True)

    def progress(self, phase: str, total: int) -> Callable[[int], None]:
        """Start the bar of a phase of `total` items; the returned function moves it to so many."""
        self.close_bar()
        bar = tqdm(total=total, desc=phase, file=self._err, leave=False, dynamic_ncols=True, disable=None)
        self._bar = bar

        def move(done: int) -> None:
            bar.update(done - bar.n)

        return move

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
