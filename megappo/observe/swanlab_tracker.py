"""SwanLab. Its own environment variables choose server, project and mode; SWANLAB_MODE=offline needs no network."""

import os

import swanlab

from megappo.observe.findings import LoggedMetrics, Samples
from megappo.observe.loggers import PROJECT, Logger, RunEnd, RunInfo, only_numbers
from megappo.observe.samples import sample_key, sample_text

STATES = {"finished": "success", "interrupted": "aborted", "failed": "crashed"}


class SwanLab(Logger):
    """Logs to an experiment of SwanLab with this run's id, in the output folder's `swanlog/`."""

    def on_start(self, run: RunInfo) -> None:
        """Start or resume the experiment."""
        self._run = swanlab.init(
            id=run.run_id,
            resume="allow",
            log_dir=str(run.output_dir / "swanlog"),
            project=os.environ.get("SWANLAB_PROJ_NAME", PROJECT),
            name=os.environ.get("SWANLAB_EXP_NAME", run.name),
            config=run.facts(),
        )

    def on_step(self, step: int, metrics: LoggedMetrics) -> None:
        """Log the numbers; SwanLab has no histograms."""
        self._run.log(only_numbers(metrics), step=step)

    def on_samples(self, step: int, samples: Samples) -> None:
        """Log the samples as texts."""
        self._run.log({sample_key(samples[0]): [swanlab.Text(sample_text(one)) for one in samples]}, step=step)

    def on_end(self, end: RunEnd) -> None:
        """Finish the experiment."""
        self._run.finish(STATES[end.status], error=end.message if end.status == "failed" else None)
