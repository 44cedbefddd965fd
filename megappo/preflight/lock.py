"""One run at a time in an output folder: a lock that the kernel releases however the run ends. Without torch."""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

from megappo.config.config_error import ConfigError

LOCK = ".lock"


def take(output_dir: Path) -> IO[str]:
    """Take a run's folder, made if need be, for as long as this process lives and the file returned is open.

    Raises:
        ConfigError: another run has it, or nothing can be written or locked there.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        file = (output_dir / LOCK).open("a+", encoding="utf-8")
        if not _locked(file, fcntl.LOCK_EX):
            raise ConfigError(_busy(output_dir, file))
        file.truncate(0)
        file.write(f"{socket.gethostname()}, pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
    except OSError as error:
        raise ConfigError(_refusal(output_dir, error)) from error
    return file


def in_use(output_dir: Path) -> str:
    """Return an error if a run has a folder, else ""."""
    try:
        with (output_dir / LOCK).open(encoding="utf-8", errors="replace") as file:
            return "" if _locked(file, fcntl.LOCK_SH) else _busy(output_dir, file)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return _refusal(output_dir, error)


def _busy(output_dir: Path, file: IO[str]) -> str:
    file.seek(0)
    line = file.readline(200).strip()
    holder = line if line.isprintable() else "unknown"
    return f"trainer.output_dir: {output_dir} is in use by a run ({holder}): wait for its end, or choose another folder"


def _locked(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refusal(output_dir: Path, error: OSError) -> str:
    return (
        f"trainer.output_dir: cannot write and lock a file in {output_dir} ({error.strerror}): name a folder where "
        "both are possible, since two runs must not write into one"
    )
