"""MLflow. Its own environment variables choose server and experiment; MLFLOW_TRACKING_URI=sqlite:///FILE needs no
network."""

import os
import re

import mlflow

from megappo.config.loading import leaves
from megappo.observe.findings import LoggedMetrics, Samples
from megappo.observe.loggers import PROJECT, Logger, RunEnd, RunInfo, only_numbers
from megappo.observe.samples import sample_key

RUN_TAG = "megappo.run_id"
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
PARAM_CHARACTERS = 500
"""MLflow's limit."""


class MLflow(Logger):
    """Logs to a run of MLflow that has this run's id as a tag."""

    def on_start(self, run: RunInfo) -> None:
        """Start or resume the run."""
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        earlier = mlflow.search_runs(filter_string=f"tags.`{RUN_TAG}` = '{run.run_id}'", output_format="list")
        run_id = earlier[0].info.run_id if earlier else None
        tags = {RUN_TAG: run.run_id, "mlflow.source.git.commit": run.commit}
        mlflow.start_run(run_id, run_name=run.name, tags=tags)
        mlflow.log_dict(run.facts(), "run.json")
        if not earlier:  # parameters cannot be changed
            settings = leaves(dict(run.config))
            mlflow.log_params({_allowed(key): str(value)[:PARAM_CHARACTERS] for key, value in settings})

    def on_step(self, step: int, metrics: LoggedMetrics) -> None:
        """Log the numbers, in a thread of MLflow's."""
        numbers = {_allowed(name): value for name, value in only_numbers(metrics).items()}
        mlflow.log_metrics(numbers, step, synchronous=False)

    def on_samples(self, step: int, samples: Samples) -> None:
        """Log the samples as a JSON file."""
        mlflow.log_dict({"samples": samples}, f"samples/step_{step:08d}/{_allowed(sample_key(samples[0]))}.json")

    def on_end(self, end: RunEnd) -> None:
        """End the run."""
        mlflow.set_tag("end", end.message or end.status)
        mlflow.flush_async_logging()
        mlflow.end_run(STATUS[end.status])


def _allowed(name: str) -> str:
    """Return a name without the characters that MLflow refuses."""
    return re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_"))
