"""Files that are there as a whole or not at all, and survive a power failure."""

import errno
import os
from collections.abc import Callable
from pathlib import Path


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or which names a folder has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no such call for folders
            raise
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Put a text in a file's place, all of it or nothing."""
    put_durably(path, lambda partial: partial.write_text(text, "utf-8"))


def put_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Put what `write` writes into the path it is given in a file's place, all of it or nothing."""
    partial = path.with_name(path.name + ".tmp")
    write(partial)
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def put_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Do as `put_durably`, without waiting for the disk, which takes up to a second where it has other work: for what
    is written again, or may be lost, after a power failure."""
    partial = path.with_name(path.name + ".tmp")
    write(partial)
    os.replace(partial, path)
