"""Names in a run's output folder, and in one of recorded rollouts, that several parts of the program look for."""

import json
import re
from pathlib import Path
from typing import Any

from megappo.config.loading import read_values

CHECKPOINTS = "checkpoints"
CONFIG_FILE = "config.yaml"
"""The resolved config, in a run's folder and in each checkpoint."""
HF_ACTOR = "hf_actor"
"""The trained actor as a Hugging Face folder, written at the end of a run; see `has_exported`."""

ROLLOUTS_FOLDER = "rollouts"
"""The samples of evaluations, step_XXXXXXXX.jsonl, and the kept rollouts of training, step_XXXXXXXX.parquet."""
EVALUATIONS = "evaluations"
"""The evaluations of a run's checkpoints, by trainer.eval_only: a folder each."""
EVALUATION_FILE = "evaluation.json"
"""Description of the evaluated model, and its metrics."""
TENSORBOARD_FOLDER = "tensorboard"
REPORT_FILE = "report.html"
"""Written while a run goes on, and at every end of it."""
_ROWS_FILE = re.compile(r"step_(\d{8,})\.safetensors")


def has_exported(folder: Path) -> bool:
    """Return whether a finished run exported its actor. A run that resumes without trainer.export_hf leaves an older
    export as it is."""
    config = folder / CONFIG_FILE
    values = read_values(config) if config.is_file() else {}
    return (folder / HF_ACTOR).is_dir() and (values.get("trainer") or {}).get("export_hf", True)


def rows_file(folder: Path, step: int) -> Path:
    """Return the path of a step's rows in a folder of recorded rollouts."""
    return folder / f"step_{step:08d}.safetensors"


def kept_file(output_dir: Path, step: int) -> Path:
    """Return the path of the rollouts that a run kept of a step."""
    return Path(output_dir, ROLLOUTS_FOLDER, f"step_{step:08d}.parquet")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines, without a last line that a kill cut short."""
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]  # splitlines splits in texts, too


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps in a folder of recorded rollouts, ascending."""
    paths = folder.iterdir() if folder.is_dir() else ()
    matches = (_ROWS_FILE.fullmatch(path.name) for path in paths)
    return sorted(int(match[1]) for match in matches if match)
