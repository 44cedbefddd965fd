"""A step's metrics: reduced over ranks, and on disk, in metrics.jsonl and TensorBoard."""

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megappo.config.errors import ConfigError

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


@dataclass(frozen=True)
class Metric:
    """A rank's part of a metric, and how the parts of the ranks become one: `sum`, `max` or `min`."""

    value: float
    reduction: Callable[[Iterable[float]], float]


def reduce_ranks(of_ranks: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Each name's parts as one, over the ranks that have it."""
    parts: dict[str, list[Metric]] = defaultdict(list)
    for metrics in of_ranks:
        for name, metric in metrics.items():
            parts[name].append(metric)
    return {name: found[0].reduction(part.value for part in found) for name, found in parts.items()}


def read_metrics(output_dir: str | Path) -> list[dict[str, Any]]:
    """The steps logged so far, in file order; a last line cut short by a kill is left out.

    Raises:
        ConfigError: a line that is not the last is no JSON object with a `step`, or the file cannot be read.
    """
    path = Path(output_dir) / METRICS_FILE
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    except OSError as error:
        raise ConfigError([f"trainer.output_dir: cannot read {path} ({error.strerror}): move it away"]) from error
    steps = []
    for number, line in enumerate(lines, start=1):
        try:
            steps.append(_parse_step(line))
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise ConfigError(
                    [
                        f"{path}, line {number}: expected one step's metrics as a JSON object with 'step', found "
                        f"{line[:60]!r}; delete the line or start in a new trainer.output_dir"
                    ]
                ) from error
    return steps


def _parse_step(line: str) -> dict[str, Any]:
    metrics = json.loads(line)
    if not isinstance(metrics, dict) or not isinstance(metrics.get("step"), int):
        raise ValueError("no 'step'")
    return metrics


class MetricsWriter:
    """Appends one line a step to metrics.jsonl and the same values to TensorBoard, flushed at once."""

    def __init__(self, output_dir: str | Path, resume_step: int = 0) -> None:
        """Open the files. What earlier runs logged for `resume_step` and later is dropped: no step stands twice.

        From step 0 on, all of it is: it stays as metrics-DATE-TIME.jsonl, of its last change.
        """
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if resume_step == 0:
            _put_aside(folder / METRICS_FILE)
        _keep_steps_before(folder, resume_step)
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=resume_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step. NaN and infinity, which JSON lacks, become null in metrics.jsonl."""
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()

    def close(self) -> None:
        """Close both files; a second call does nothing."""
        self._file.close()
        self._tensorboard.close()


def _put_aside(path: Path) -> None:
    if path.exists():
        date = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
        path.rename(path.with_stem(f"{path.stem}-{date}"))


def _keep_steps_before(folder: Path, resume_step: int) -> None:
    kept = [metrics for metrics in read_metrics(folder) if metrics["step"] < resume_step]
    temporary = folder / (METRICS_FILE + ".tmp")
    temporary.write_text("".join(json.dumps(metrics) + "\n" for metrics in kept), encoding="utf-8")
    os.replace(temporary, folder / METRICS_FILE)
