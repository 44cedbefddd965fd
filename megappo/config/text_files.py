"""Reads files that users name or that runs have left: regular files only, with a bound on their size, decoded and
checked. A path may lead to a pipe, a device or a file without end, and a file may hold anything."""

import errno
import json
import math
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from megappo.config.config_error import ConfigError, looked_in
from megappo.errors import ActionableError

LARGEST_JSON = 2**24
"""Bytes. An index of a model's tensors has a few MiB at most, its other files some KiB."""
LARGEST_LINES = 2**36
"""Bytes of a file of JSON lines, or of another file that grows with a run or a model."""
LONGEST_LINE = 2**28
"""Bytes of a line. One of a long episode with the experts of each token has 100 MiB."""

Validator = Callable[[Any], object]
"""Raises ValueError for content of wrong types or values, as `model_validate` of a pydantic model does."""


class TextFileError(ActionableError, ValueError):
    """The reason why a file is not read, and the remedy. The caller adds the path."""


class MissingFileError(TextFileError):
    """A file of a download is not here yet."""


def open_file(path: str | Path, most_bytes: float = LARGEST_LINES) -> BinaryIO:
    """Open an ordinary file to read, without waiting for the writer of a pipe.

    Raises:
        OSError: it is missing, not a file (a folder, a pipe, a device), too large, or unreadable.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    info = os.fstat(descriptor)
    fault = ""
    if not stat.S_ISREG(info.st_mode):
        fault = "it is a folder, or no ordinary file: name a file"
    elif info.st_size > most_bytes:
        fault = f"it has {info.st_size:,} bytes, more than {most_bytes:,}: is it the right file?"
    if fault:
        os.close(descriptor)
        raise OSError(errno.EINVAL, fault, str(path))
    return open(descriptor, "rb")


def read_text(path: Path, most_bytes: int) -> str:
    """Return the text of a file.

    Raises:
        TextFileError: it cannot be opened, as by `open_file`, or is not UTF-8.
    """
    try:
        with open_file(path, most_bytes) as file:
            data = file.read(most_bytes)
    except OSError as error:
        advice = f"{looked_in(path)}: correct the path or its permissions"
        raise TextFileError(f"{error.strerror}{'' if error.errno == errno.EINVAL else advice}") from error
    except ValueError as error:  # a NUL in the path
        raise TextFileError(f"{error}: correct the path") from error
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
        return _parsed(text)
    except ValueError as error:
        raise TextFileError(f"{error}: copy it again") from error


def read_record(path: Path, check: Validator, remedy: str) -> dict[str, Any]:
    """Return the JSON object in a file that a run has written; {} if there is no such file.

    Raises:
        ConfigError: it cannot be read, or is not what a run writes; the message names the file and ends with the
            remedy.
    """
    if not os.path.lexists(path):
        return {}
    try:
        return _parsed(read_text(path, LARGEST_JSON), check)
    except ValueError as error:
        raise ConfigError(f"{path} is not what a run writes: {error}; {remedy}") from error


def json_lines(path: Path, check: Validator, remedy: str, last_bytes: float = math.inf) -> list[dict[str, Any]]:
    """Return the JSON objects in a file to which a run appends one a line, without a last line that a kill cut short;
    none if there is no such file.

    Args:
        last_bytes: read only the whole lines among this number of bytes at the end.
    Raises:
        ConfigError: as `read_record`; the message names the line, too.
    """
    if not os.path.lexists(path):
        return []
    found = []
    line = b""
    try:
        with open_file(path) as file:
            start = max(file.seek(0, os.SEEK_END) - last_bytes, 0)
            if file.seek(int(start)):
                file.readline(LONGEST_LINE)
            for line in iter(partial(file.readline, LONGEST_LINE), b""):
                if len(line) == LONGEST_LINE:
                    raise OSError(f"a line has more than {LONGEST_LINE:,} bytes")
                found.append(_parsed(line, check))
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and not line.endswith(b"\n"):
            return found
        where = f", line {len(found) + 1} ({line[:60]!r})," if line else ""
        raise ConfigError(f"{path}{where} is not what a run writes: {error}; {remedy}") from error
    return found


def _parsed(text: str | bytes, check: Validator = bool) -> dict[str, Any]:
    """Return the JSON object in a text; raise ValueError with one line about what else it is."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    try:
        check(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return content
