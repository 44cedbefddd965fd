"""Weights & Biases. Its own environment variables choose server, project and mode; WANDB_MODE=offline needs no
network."""

import os
from pathlib import Path

import wandb

from megappo.observe.findings import LoggedMetrics, Samples
from megappo.observe.loggers import PROJECT, Histogram, Logger, RunEnd, RunInfo
from megappo.observe.samples import sample_key, sample_table


class Wandb(Logger):
    """Logs to a run of W&B with this run's id, in the output folder's `wandb/`."""

    def on_start(self, run: RunInfo) -> None:
        """Start or resume the run. Its x-axis is `step`, as W&B's own never goes back to a checkpoint's step."""
        self._run = wandb.init(
            id=run.run_id,
            resume="allow",
            dir=run.output_dir,
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run.name),
            config=run.facts(),
        )
        self._run.define_metric("*", step_metric="step")

    def on_step(self, step: int, metrics: LoggedMetrics) -> None:
        """Log numbers and histograms."""
        values = {name: _histogram(value) if isinstance(value, Histogram) else value for name, value in metrics.items()}
        self._run.log({"step": step, **{name: value for name, value in values.items() if value is not None}})

    def on_samples(self, step: int, samples: Samples) -> None:
        """Log a table of the samples."""
        columns, rows = sample_table(samples)
        self._run.log({"step": step, sample_key(samples[0]): wandb.Table(columns=columns, data=rows)})

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Note the newest checkpoint."""
        self._run.summary["checkpoint"] = str(path)

    def on_end(self, end: RunEnd) -> None:
        """Finish the run: as preempted, if it was interrupted."""
        self._run.summary["end"] = end.message or end.status
        if end.status == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=int(end.status != "finished"))
        wandb.teardown()  # its process has written all once this returns, and the trainer exits at once


def _histogram(histogram: Histogram) -> wandb.Histogram | None:
    counts, limits = histogram.bins()
    return wandb.Histogram(np_histogram=(counts, limits)) if counts else None
