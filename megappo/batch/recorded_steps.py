"""Steps in a folder of recorded rollouts. Torch-free."""

import re
from pathlib import Path

_NAME = re.compile(r"step_(\d{8,})\.safetensors")


def rows_file(folder: Path, step: int) -> Path:
    """Return the path of a step's rows."""
    return folder / f"step_{step:08d}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps in the folder, ascending."""
    paths = folder.iterdir() if folder.is_dir() else ()
    matches = (_NAME.fullmatch(path.name) for path in paths)
    return sorted(int(match[1]) for match in matches if match)
