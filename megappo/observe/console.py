"""A run's output while it trains: one aligned line per step, and a few responses at each evaluation."""

import io
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from megappo.config.trainer_section import CONSOLE_FIELDS, EVAL_INTERVAL
from megappo.errors import escaped_lines
from megappo.observe.findings import Finding, LoggedMetrics, Samples
from megappo.observe.loggers import Logger, RunInfo
from megappo.observe.samples import format_samples
from megappo.runtime.status import STATUS, format_score, format_seconds

HEADER_INTERVAL = 64
ETA_STEPS = 10
"""The last steps whose median time estimates the remaining ones."""


def held_out_score(metrics: Mapping[str, float | None], metric: str = "score/mean") -> float | None:
    """Return the mean over the held-out data sets of `val/<dataset>/<metric>`; None where the step has none.

    With rewards of 0 and 1 (exact match) the mean score is the accuracy.
    """
    scores = []
    for name, value in metrics.items():
        if name.startswith("val/") and name.endswith(f"/{metric}") and value is not None:
            scores.append(value)
    return statistics.fmean(scores) if scores else None


class Column(NamedTuple):
    """A column of the lines: the metric that it shows, and its format, or SCORE."""

    metric: str
    number_format: str


SCORE = "score"
"""The format of a score, which has any size."""
HELD_OUT = "val"
KL_PENALTY = "reward/kl_penalty/mean"
COLUMNS = {
    "reward": Column("reward/score/mean", SCORE),
    "val": Column(HELD_OUT, SCORE),
    "ref_kl": Column(KL_PENALTY, "z.4f"),
    "ppo_kl": Column("actor/ppo_kl", "z.4f"),
    "entropy": Column("actor/entropy", ".3f"),
    "clipfrac": Column("actor/pg_clipfrac", ".3f"),
    "vf_ev": Column("critic/vf_explained_var", ".3f"),
    "length": Column("rollout/response_length/mean", ".1f"),
    "tok/s": Column("rollout/tokens_per_second", ".0f"),
    "step_s": Column("timing_s/step", ".1f"),
}
"""Title -> column. Any other title of trainer.console_fields is a metric's name."""
HELD_OUT_LOSS, HELD_OUT_ACCURACY, HELD_OUT_EXPLAINED = "val_loss", "val_accuracy", "val_critic/vf_explained_var"
HELD_OUT_OF_EXAMPLES = (HELD_OUT_LOSS, HELD_OUT_ACCURACY, HELD_OUT_EXPLAINED)


def _of_examples(component: str, loss: str, **columns: Column) -> dict[str, Column]:
    """Return the columns of a run on examples.

    Args:
        columns: further ones, behind the loss.
    """
    return {
        "loss": Column(f"{component}/{loss}", ".4f"),
        **columns,
        "grad_norm": Column(f"{component}/grad_norm", ".3f"),
        "lr": Column(f"{component}/lr", ".2g"),
        "epochs": Column("data/epochs", ".2f"),
        "tok/s": Column("data/tokens_per_second", ".0f"),
        "step_s": Column("timing_s/step", ".1f"),
    }


OF_KINDS = {
    "sft": _of_examples("actor", "nll_loss", val_loss=Column(HELD_OUT_LOSS, ".4f")),
    "critic": _of_examples("critic", "vf_loss", vf_ev=COLUMNS["vf_ev"], val_vf_ev=Column(HELD_OUT_EXPLAINED, ".3f")),
    "reward_model": _of_examples(
        "reward_model",
        "bt_loss",
        val_loss=Column(HELD_OUT_LOSS, ".4f"),
        accuracy=Column("reward_model/accuracy", ".3f"),
        val_acc=Column(HELD_OUT_ACCURACY, ".3f"),
    ),
}
"""trainer.kind -> its columns, by title, unless trainer.console_fields names others."""
OTHER_FORMAT = ".4g"
COLUMN_WIDTH = 8
"""Least characters of a column; a longer number is written in scientific form."""
UNHEALTHY = "bold red"


def escape_unprintable() -> None:
    """Make stdout escape what its encoding lacks, as stderr does, so that no print ends a run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class RemainingTime:
    """Estimates the time until the last step: of steps by the median of the last ones, of evaluations and saves by the
    last one, so that a step with an evaluation does not change it.

    Args:
        intervals: phase of a step ("evaluate", "save") -> the steps from one occurrence to the next; it also happens
            after the last step.
    """

    def __init__(self, total_steps: int, intervals: Mapping[str, int]):
        self._total_steps, self._intervals = total_steps, intervals
        self._plain_seconds: deque[float] = deque(maxlen=ETA_STEPS)
        self._phase_seconds: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take the times of a step."""
        if "timing_s/step" not in metrics:
            return
        plain = metrics["timing_s/step"]
        for phase in self._intervals:
            seconds = metrics.get(f"timing_s/{phase}", 0.0)
            plain -= seconds
            if seconds:
                self._phase_seconds[phase] = seconds
        self._plain_seconds.append(plain)

    def after(self, step: int) -> float | None:
        """Return the seconds from the end of a step to the end of the last one; None while no step has been timed."""
        if not self._plain_seconds:
            return None
        num_steps = self._total_steps - step
        total = num_steps * statistics.median(self._plain_seconds)
        for phase, seconds in self._phase_seconds.items():
            interval = self._intervals[phase]
            num_times = -(-self._total_steps // interval) - step // interval if num_steps else 0
            total += num_times * seconds
        return total


class Console(Logger):
    """Prints the lines, and passes the estimate of the remaining time to the display of the process.

    Attributes:
        reads: as in `Monitor`: where the first metric is 1, the columns of the others are marked.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out
        self.reads: Mapping[str, Sequence[str]] = {}
        self._num_lines = 0
        self._sampled_step: int | None = None
        self._samples = ""

    def on_start(self, run: RunInfo) -> None:
        """Choose the columns and the number of samples."""
        trainer = run.config.get("trainer", {})
        self._total_steps, self._num_samples = run.total_steps, trainer.get("print_samples", 2)
        titles = trainer.get("console_fields", CONSOLE_FIELDS)
        self._columns = {title: COLUMNS.get(title, Column(title, OTHER_FORMAT)) for title in titles}
        if tuple(titles) == CONSOLE_FIELDS:
            self._columns = OF_KINDS.get(trainer.get("kind", "ppo"), self._columns)
        self._step_width = max(len("step"), 2 * len(str(run.total_steps)) + 1)
        eval_interval = trainer.get("eval_interval") or EVAL_INTERVAL
        save_interval = trainer.get("save_interval") or run.total_steps
        self._remaining = RemainingTime(run.total_steps, {"evaluate": eval_interval, "save": save_interval})

    def on_step(self, step: int, metrics: LoggedMetrics) -> None:
        """Print a step's line, under a header every `HEADER_INTERVAL` lines."""
        STATUS.end_start()
        if self._num_lines % HEADER_INTERVAL == 0:
            self._line("step", *self._columns, "eta")
        self._num_lines += 1
        # A run with the KL in its loss alone has the distance to the reference as actor/kl_loss.
        held_out = {HELD_OUT: held_out_score(metrics)}
        held_out |= {name: held_out_score(metrics, name.removeprefix("val_")) for name in HELD_OUT_OF_EXAMPLES}
        values = {**held_out, KL_PENALTY: metrics.get("actor/kl_loss"), **metrics}
        cells = []
        unhealthy = {read for check, names in self.reads.items() if metrics.get(check) for read in names}
        for title, (metric, number_format) in self._columns.items():
            cell = format_number(values.get(metric), number_format).rjust(max(COLUMN_WIDTH, len(title)))
            cells.append(STATUS.styled(cell, UNHEALTHY) if metric in unhealthy else cell)
        self._remaining.add(metrics)
        seconds = self._remaining.after(step)
        STATUS.ends_at = None if seconds is None else time.monotonic() + seconds
        eta = "-" if seconds is None else format_seconds(seconds)
        self._line(f"{step}/{self._total_steps}", *cells, eta)

    def on_finding(self, finding: Finding) -> None:
        """Print the finding, and responses that show it."""
        first, *samples = str(finding).splitlines()
        styled = first if finding.is_over else STATUS.styled(first, UNHEALTHY)
        STATUS.print("\n".join([styled, *samples]), self._out)

    def on_samples(self, step: int, samples: Samples) -> None:
        """Print the first samples of an evaluation, of its first data set, unless all are as the last time."""
        STATUS.end_start()
        if step == self._sampled_step or not self._num_samples:
            return
        self._sampled_step, last = step, self._samples
        self._samples = format_samples(samples[: self._num_samples])
        if self._samples != last:
            self.text(self._samples)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Print the checkpoint's path."""
        self.text(f"checkpoint {path}")

    def text(self, text: str) -> None:
        """Print a text of any number of lines, with what a terminal would take for commands escaped."""
        STATUS.print(escaped_lines(text), self._out)

    def _line(self, step: str, *cells: str) -> None:
        padded = [cell.rjust(COLUMN_WIDTH) for cell in cells]
        STATUS.print("  ".join([step.rjust(self._step_width), *padded]), self._out)


def format_number(value: object, number_format: str) -> str:
    """Return a number as a cell: in scientific form where it is wide, "-" where there is none."""
    if not isinstance(value, int | float):
        return "-"
    text = format_score(value) if number_format == SCORE else format(value, number_format)
    return text if len(text) <= COLUMN_WIDTH else format(value, ".1e")
