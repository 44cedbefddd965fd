"""One run at a time in an output folder. The kernel releases the locks however a run ends."""

import fcntl
import os
import socket
import stat
import time
from contextlib import ExitStack
from errno import EINVAL
from pathlib import Path

from megappo.config.config_error import ConfigError
from megappo.config.text_files import TextFileError, read_text

LOCK = ".lock"
"""File that a run locks besides its folder: some file systems cannot lock folders."""
_HELD: dict[Path, tuple[int, ExitStack]] = {}
"""Folder -> the descriptor of its file, and what `lock` returned."""


def lock(output_dir: Path) -> ExitStack:
    """Lock a run's folder, made if need be, for as long as this process lives and the context returned is open.

    Raises:
        ConfigError: another run has locked it, or nothing can be written or locked there.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as handles:
            file = _lock(output_dir, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX, handles)
            os.ftruncate(file, 0)
            os.write(file, f"{socket.gethostname()}, pid {os.getpid()}, since {time.strftime('%F %T')}\n".encode())
            held = handles.pop_all()
    except BlockingIOError as error:
        raise ConfigError(_busy(output_dir)) from error
    except OSError as error:
        raise ConfigError(_refusal(output_dir, error)) from error
    _HELD[output_dir] = file, held
    return held


def check_lock(output_dir: Path) -> None:
    """Lock a folder again, with a warning, if it was locked and the file is not the one that is locked any more.

    Raises:
        ConfigError: another run has locked it meanwhile.
    """
    if output_dir in _HELD and not _is_there(output_dir, _HELD[output_dir][0]):
        print(f"WARNING: {output_dir / LOCK} was removed or replaced: this run locks its folder again", flush=True)
        _, held = _HELD.pop(output_dir)
        held.close()
        held.enter_context(lock(output_dir))


def in_use(output_dir: Path) -> str:
    """Return an error if a run has a folder, else ""."""
    try:
        with ExitStack() as handles:
            _lock(output_dir, os.O_RDONLY, fcntl.LOCK_SH, handles)
    except FileNotFoundError:
        return ""
    except BlockingIOError:
        return _busy(output_dir)
    except OSError as error:
        return _refusal(output_dir, error)
    return ""


def _lock(output_dir: Path, flags: int, kind: int, handles: ExitStack) -> int:
    """Lock the folder and the file in it until the handles are closed, and return the file's descriptor.

    Raises:
        BlockingIOError: another process has locked them.
        OSError: they cannot be locked, or the file is a link, another name of a file elsewhere, a pipe or a device.
    """
    folder = os.open(output_dir, os.O_RDONLY)
    handles.callback(os.close, folder)
    try:
        fcntl.flock(folder, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # some network file systems lock files alone
    file = os.open(output_dir / LOCK, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    handles.callback(os.close, file)
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
        raise OSError(EINVAL, f"{LOCK} is no file of its own")
    fcntl.flock(file, kind | fcntl.LOCK_NB)
    if not _is_there(output_dir, file):
        raise BlockingIOError  # another process has replaced it
    return file


def _is_there(output_dir: Path, file: int) -> bool:
    """Return whether the folder's file is still the one with this descriptor."""
    path = output_dir / LOCK
    return os.path.lexists(path) and os.path.samestat(os.lstat(path), os.fstat(file))


def _busy(output_dir: Path) -> str:
    try:
        line = read_text(output_dir / LOCK, 200).strip()
    except TextFileError:
        line = ""
    holder = line if line and line.isprintable() else "unknown"
    return f"trainer.output_dir: {output_dir} is in use by a run ({holder}): wait for its end, or choose another folder"


def _refusal(output_dir: Path, error: OSError) -> str:
    return (
        f"trainer.output_dir: cannot write and lock a file in {output_dir} ({error.strerror}): name a folder where "
        f"both are possible, since two runs must not write into one; remove {LOCK} there if it is a link"
    )
