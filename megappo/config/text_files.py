"""Read small files that a user names, or report why they cannot be read, whatever the path leads to."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from megappo.config.config_error import looked_in
from megappo.errors import ActionableError

LARGEST_JSON = 16 * 2**20
"""Bytes. An index of a model's tensors has a few MiB at most, its other files some KiB."""


class TextFileError(ActionableError, ValueError):
    """The reason why a file is not read, and the remedy. The caller adds the path."""


def read_text(path: Path, most_bytes: int) -> str:
    """Return the text of a file.

    Raises:
        TextFileError: it is missing, not a file (a folder, a pipe, a device), too large, unreadable, or not UTF-8.
    """
    try:
        info = os.stat(path)  # first: to open a pipe would wait for a writer
        if not stat.S_ISREG(info.st_mode):
            kind = "a folder" if stat.S_ISDIR(info.st_mode) else "no ordinary file"
            raise TextFileError(f"it is {kind}: name a file")
        if info.st_size > most_bytes:
            raise TextFileError(f"it has {info.st_size:,} bytes, more than {most_bytes:,}: is it the right file?")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise TextFileError(f"{error.strerror}{looked_in(path)}: correct the path") from error
    except OSError as error:
        raise TextFileError(f"{error.strerror}: correct the path or its permissions") from error
    except ValueError as error:
        if isinstance(error, TextFileError):
            raise
        raise TextFileError(f"{error}: correct the path") from error  # a NUL in it
    return _decoded(data)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file that holds one JSON object.

    Raises:
        TextFileError: as `read_text`, or it is not valid JSON, or not an object.
    """
    text = read_text(path, LARGEST_JSON)
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise TextFileError("it nests too deeply: copy it again") from error
    except ValueError as error:
        raise TextFileError(f"it is not valid JSON ({error}): copy it again") from error
    if not isinstance(found, dict):
        raise TextFileError("it is not a JSON object: copy it again")
    return found


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TextFileError(f"it is not UTF-8 text (line {line}): save it as UTF-8") from error
