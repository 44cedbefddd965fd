"""Trackio. It logs to TRACKIO_DIR on this machine; its own environment variables may name a space on the hub."""

import os

import trackio

from megappo.observe.findings import LoggedMetrics, Samples
from megappo.observe.loggers import PROJECT, Logger, RunEnd, RunInfo, only_numbers
from megappo.observe.samples import sample_key, sample_table


class Trackio(Logger):
    """Logs to a run of Trackio whose name ends with this run's id."""

    def on_start(self, run: RunInfo) -> None:
        """Start or resume the run."""
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        name = f"{run.name}-{run.run_id}"
        self._run = trackio.init(project=project, name=name, resume="allow", config=run.facts())

    def on_step(self, step: int, metrics: LoggedMetrics) -> None:
        """Log the numbers."""
        self._run.log(only_numbers(metrics), step=step)

    def on_samples(self, step: int, samples: Samples) -> None:
        """Log a table of the samples."""
        columns, rows = sample_table(samples)
        self._run.log({sample_key(samples[0]): trackio.Table(columns=columns, data=rows)}, step=step)

    def on_end(self, end: RunEnd) -> None:
        """Finish the run."""
        self._run.finish()
