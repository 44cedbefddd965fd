"""metrics.jsonl: a line for each step of a run. Torch-free."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megappo.config.config_error import ConfigError
from megappo.observe.files import keep_earlier, write_json_lines
from megappo.observe.loggers import Logger, RunEnd, RunInfo, only_numbers

METRICS_FILE = "metrics.jsonl"


class MetricsFile(Logger):
    """Appends one line a step to metrics.jsonl, flushed at once."""

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
        self._file = path.open("a", encoding="utf-8")

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one step. NaN and infinity, which JSON lacks, become null; histograms are left out."""
        finite = {name: value if math.isfinite(value) else None for name, value in only_numbers(metrics).items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()

    def on_end(self, end: RunEnd) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return the steps logged so far, in file order; a last line cut short by a kill is left out.

    Raises:
        ConfigError: a line that is not the last is not a JSON object with a `step`.
    """
    path = Path(output_dir) / METRICS_FILE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    steps = []
    for number, line in enumerate(lines, start=1):
        if (metrics := _parse_step(line)) is not None:
            steps.append(metrics)
        elif number < len(lines):
            raise ConfigError(
                f"{path}, line {number}: expected one step's metrics as a JSON object with 'step', found "
                f"{line[:60]!r}; delete the line or start in a new trainer.output_dir"
            )
    return steps


def _parse_step(line: str) -> dict[str, Any] | None:
    try:
        metrics = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return metrics if isinstance(metrics, dict) and isinstance(metrics.get("step"), int) else None
