"""The training loop's output: rank 0's observer writes and prints, the other ranks' does nothing."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megappo.config.schema import Config
from megappo.observe.console import Console
from megappo.observe.files import REPORT_FILE
from megappo.observe.metrics import MetricsWriter
from megappo.observe.report import summary, write_report
from megappo.observe.samples import append_samples, drop_samples, format_samples


class Observer:
    """Metrics, console, samples and the final report of one run, in its output folder."""

    def __init__(self, output_dir: str | Path, total_steps: int, resume_step: int = 0) -> None:
        """Open the run's files.

        `resume_step` is the first step that will be logged now: 0 for a new run, k + 1 after a checkpoint of step k.
        What an earlier run left for it and later steps is dropped; a new run keeps an earlier one's metrics, under
        another name.

        Raises:
            ConfigError: metrics.jsonl, which an earlier run left, cannot be read.
        """
        self._output_dir = Path(output_dir)
        (self._output_dir / REPORT_FILE).unlink(missing_ok=True)
        drop_samples(output_dir, resume_step)
        self._writer = MetricsWriter(output_dir, resume_step)
        self._console = Console(total_steps)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log a step once; `timing_s/*` are this rank's, all else is of all ranks."""
        self._console.step(step, metrics)
        self._writer.write(step, metrics)  # last: TensorBoard's thread then takes the interpreter for a millisecond

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Print and keep a few rollouts, each a mapping such as prompt, response, label, score."""
        if samples:
            append_samples(self._output_dir, step, samples)
            self._console.text(format_samples(step, samples))

    def message(self, text: str) -> None:
        """Print a line between steps: what the run is doing now."""
        self._console.text(text)

    def progress(self, phase: str, total: int) -> Callable[[int], None]:
        """A progress bar of `total` items on a terminal; call the returned function with how many are done by now."""
        return self._console.progress(phase, total)

    def finish(self) -> None:
        """After the last step: write report.html and print where everything is and what the run achieved."""
        report = write_report(self._output_dir)
        self._console.text(summary(self._output_dir, report))

    def close(self) -> None:
        """Close the files, whether the run ended well or not; a second call does nothing."""
        self._console.close_bar()
        self._writer.close()


class NullObserver:
    """The observer of the ranks that stay silent; same methods as Observer."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Nothing."""

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def progress(self, phase: str, total: int) -> Callable[[int], None]:
        """A function that does nothing."""
        return lambda done: None

    def finish(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def open_observer(
    config: Config, lines: Iterable[str], resume_step: int, rank: int, cleanup: ExitStack
) -> Observer | NullObserver:
    """Return the observer of a rank, after it has printed the lines that are not empty.

    Args:
        resume_step: see `Observer`.
        cleanup: closes the observer.
    """
    trainer = config.trainer
    observer = NullObserver() if rank else Observer(trainer.output_dir, trainer.total_steps, resume_step)
    cleanup.callback(observer.close)
    for line in filter(None, lines):
        observer.message(line)
    return observer
