"""Folders that appear whole or not at all."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


def temporary_folder(target: Path) -> Path:
    """Where `target` is written before it takes its place: beside it, as a rename must not leave the file system."""
    return target.with_name(target.name + ".tmp")


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new folder that takes the place of `target` when the block ends well, and is removed when it does not.

    What a killed program left of it is removed first.

    Raises:
        FileExistsError: `target` is a file.
        OSError: the folder cannot be made; `target` is as it was.
    """
    if target.is_file():
        raise FileExistsError(f"{target} is a file; name a folder to write to")
    temporary = temporary_folder(target)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _replace(temporary: Path, target: Path) -> None:
    """Put the finished folder in the old one's place; a kill between the renames leaves the old one as `.old`."""
    old = target.with_name(target.name + ".old")
    if old.exists():
        shutil.rmtree(old)
    had_one = target.exists()
    if had_one:
        target.rename(old)
    try:
        temporary.rename(target)
    except BaseException:
        if had_one and not target.exists():
            old.rename(target)
        raise
    if had_one:
        shutil.rmtree(old)
