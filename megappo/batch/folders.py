"""Which steps a folder of recorded rollouts has. Torch-free."""

import re
from pathlib import Path

_NAME = re.compile(r"step_(\d{8,})\.safetensors")


def rows_file(folder: Path, step: int) -> Path:
    """Where a step's rows lie."""
    return folder / f"step_{step:08d}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    """The steps that are there, in order."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(match[1]) for path in found if (match := _NAME.fullmatch(path.name)))
