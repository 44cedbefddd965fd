"""Reading of metrics.jsonl. Torch-free."""

import json
from pathlib import Path
from typing import Any

from megappo.config.config_error import ConfigError

METRICS_FILE = "metrics.jsonl"


def read_metrics(output_dir: str | Path) -> list[dict[str, Any]]:
    """Return the steps logged so far, in file order; a last line cut short by a kill is left out.

    Raises:
        ConfigError: a line that is not the last is no JSON object with a `step`.
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
