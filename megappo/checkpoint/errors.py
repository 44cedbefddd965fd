"""The error of a checkpoint that cannot be used."""

from pathlib import Path

from megappo.errors import ActionableError


class CheckpointError(ActionableError, RuntimeError):
    """What is wrong with a checkpoint, and what to do about it."""


def no_folder(folder: Path) -> str:
    """Says that there is no such folder, and which ones there are where it should be."""
    parent = next(path for path in folder.resolve().parents if path.is_dir())
    found = sorted(path.name for path in parent.iterdir() if path.is_dir())
    return f"no folder {folder}; {parent} has {', '.join(found[:20]) or 'none'}{', ...' if len(found) > 20 else ''}"
