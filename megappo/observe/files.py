"""Names in a run's output folder, and in one of recorded rollouts, that several parts of the program look for."""

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megappo.errors import escaped
from megappo.runtime.durable_files import write_durably

CHECKPOINTS = "checkpoints"
CONFIG_FILE = "config.yaml"
"""The resolved config, in a run's folder and in each checkpoint."""
HF_ACTOR, HF_CRITIC, HF_REWARD_MODEL = "hf_actor", "hf_critic", "hf_reward_model"
"""The trained actor, critic and reward model as Hugging Face folders, written at the end of a run; see
`run_file.exported_model`."""

ROLLOUTS_FOLDER = "rollouts"
"""The samples of evaluations, step_XXXXXXXX.jsonl, and the kept rollouts of training, step_XXXXXXXX.parquet."""
EVALUATIONS = "evaluations"
"""The evaluations of a run's checkpoints, by trainer.eval_only: a folder each."""
EVALUATION_FILE = "evaluation.json"
"""Description of the evaluated model, and its metrics."""
TENSORBOARD_FOLDER = "tensorboard"
REPORT_FILE = "report.html"
"""Written while a run trains, and whenever it ends."""


def no_run(folder: Path, missing: str) -> str:
    """Return the error of a command for a folder that is not a run's, with the nearest that is.

    Args:
        missing: file or folder in the output folder of a run.
    """
    if not folder.is_dir():
        return f"no folder {folder} (looked in {Path.cwd()}): name the output folder of a run"
    near = [path.parent for path in sorted(folder.glob(f"*/{missing}"))]
    near += [path for path in folder.absolute().parents if (path / missing).exists()]
    advice = f"did you mean {near[0]}?" if near else "name the output folder of a run"
    return escaped(f"{folder} has no {missing}: {advice}")


def rows_file(folder: Path, step: int) -> Path:
    """Return the path of a step's rows in a folder of recorded rollouts."""
    return folder / f"step_{step:08d}.safetensors"


def kept_file(output_dir: Path, step: int) -> Path:
    """Return the path of the rollouts that a run kept of a step."""
    return Path(output_dir, ROLLOUTS_FOLDER, f"step_{step:08d}.parquet")


def write_json_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Put objects in a file's place, one a line."""
    write_durably(path, "".join(json.dumps(line) + "\n" for line in lines))


def keep_earlier(path: Path) -> None:
    """Rename a file or folder of an earlier run, if there is one, to NAME-DATE-TIME, by the time of its last change."""
    if os.path.lexists(path):
        date = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.lstat().st_mtime))
        path.rename(path.with_stem(f"{path.stem}-{date}"))


def files_named(folder: Path, name: str, *, ending: str) -> list[Path]:
    """Return the files `NAME_NUMBER.ENDING` in a folder, in the order of their numbers."""
    pattern = re.compile(rf"{name}_\d{{5,}}\.{ending}")
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if pattern.fullmatch(path.name)), key=number_of)


def number_of(path: Path) -> int:
    """Return the number of one of `files_named`."""
    return int(path.stem.rpartition("_")[2])


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps in a folder of recorded rollouts, ascending."""
    return [number_of(path) for path in files_named(folder, "step", ending="safetensors")]
