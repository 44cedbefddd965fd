"""Files that are there as a whole or not at all, and survive a power failure; and errors that name the file."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Add the file's name to errors of the operating system that lack it, such as errors of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(file)
        raise


def append(path: Path, text: str) -> None:
    """Append a text to a file, which is made with its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(text)


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to the disk."""
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

    def write_and_sync(partial: Path) -> None:
        write(partial)
        sync(partial)

    put_whole(path, write_and_sync)
    sync(path.parent)


def put_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Do as `put_durably`, without waiting for the disk, which takes up to a second where it has other work: for what
    is written again, or may be lost, after a power failure."""
    partial = path.with_name(path.name + ".tmp")
    with naming(path):
        partial.unlink(missing_ok=True)  # a link would lead elsewhere
        write(partial)
        os.replace(partial, path)
