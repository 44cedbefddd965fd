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
        is_file = stat.S_ISREG(info.st_mode)
        data = path.read_bytes() if is_file and info.st_size <= most_bytes else b""
    except OSError as error:
        remedy = "correct the path or its permissions"
        raise TextFileError(f"{error.strerror}{looked_in(path)}: {remedy}") from error
    except ValueError as error:  # a NUL in the path
        raise TextFileError(f"{error}: correct the path") from error
    if not is_file:
        raise TextFileError("it is a folder, or no ordinary file: name a file")
    if info.st_size > most_bytes:
        raise TextFileError(f"it has {info.st_size:,} bytes, more than {most_bytes:,}: is it the right file?")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TextFileError(f"it is not UTF-8 text (line {line}): save it as UTF-8") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file that holds one JSON object.

    Raises:
        TextFileError: as `read_text`, or it is not valid JSON, or not an object.
    """
    text = read_text(path, LARGEST_JSON)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TextFileError(f"it is not valid JSON ({error}): copy it again") from error
    if not isinstance(found, dict):
        raise TextFileError("it is not a JSON object: copy it again")
    return found
