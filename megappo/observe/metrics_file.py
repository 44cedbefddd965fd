"""metrics.jsonl: a line for each step of a run. Torch-free."""

import json
import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from megappo.config.text_files import json_lines
from megappo.observe.files import keep_earlier, write_json_lines
from megappo.observe.findings import LoggedMetrics
from megappo.observe.loggers import Logger, RunInfo, only_numbers
from megappo.runtime.durable_files import append

METRICS_FILE = "metrics.jsonl"
REMEDY = "delete the line, or start in a new trainer.output_dir"


class StepMetrics(BaseModel, extra="allow", strict=True, allow_inf_nan=False):
    """A line of metrics.jsonl: the step and its metrics, null where one is no number."""

    __pydantic_extra__: dict[str, float | None]
    step: int = Field(ge=0)


class MetricsFile(Logger):
    """Appends one line a step to metrics.jsonl, a whole one at a time."""

    def on_start(self, run: RunInfo) -> None:
        """Open the file. Drop what earlier runs logged for `resume_step` and later, so that no step stands twice; a run
        from step 0 on keeps an earlier one's metrics under another name.

        Raises:
            ConfigError: metrics.jsonl, which an earlier run left, cannot be read.
        """
        path = run.output_dir / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        if not run.resume_step:
            keep_earlier(path)
        earlier = read_metrics(run.output_dir)
        write_json_lines(path, (metrics for metrics in earlier if metrics["step"] < run.resume_step))
        self._path = path

    def on_step(self, step: int, metrics: LoggedMetrics) -> None:
        """Write one step. NaN and infinity, which JSON lacks, become null; histograms are left out."""
        finite = {name: value if math.isfinite(value) else None for name, value in only_numbers(metrics).items()}
        append(self._path, json.dumps({"step": step, **finite}, allow_nan=False) + "\n")


def read_metrics(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return the steps logged so far, in file order; a last line cut short by a kill is left out.

    Raises:
        ConfigError: the file cannot be read, or a line is not a step's metrics.
    """
    return json_lines(Path(output_dir) / METRICS_FILE, StepMetrics.model_validate, REMEDY)
