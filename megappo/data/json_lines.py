"""Lines of JSON by number: read from the file and parsed when asked for."""

import codecs
import itertools
import json
import math
import os
import weakref
from array import array
from collections.abc import Sequence
from typing import Any, BinaryIO

from megappo.data.file_heads import HEAD_BYTES, refuse_no_lines
from megappo.runtime.heartbeat import LIFE

LINES_FOR_FIELDS = 100
LINES_AT_ONCE = 100_000
"""Of which it is looked up where they begin, between two heartbeats."""
BYTES_AT_ONCE = 2**26
"""Of lines behind each other that are read in one go."""


class JsonLines:
    """A file with one JSON object a line, in UTF-8. In memory is where each line begins, 8 bytes a line.

    Args:
        file: opened for this, which reads from it as long as it lives.
        name: of the file, for messages.
    Raises:
        RecordsError: it is of another kind.
    """

    unit = "line"

    def __init__(self, file: BinaryIO, name: str):
        self._file, self._name = file, name
        weakref.finalize(self, file.close)
        self._stamp = _stamp(file)
        head = file.read(HEAD_BYTES)
        refuse_no_lines(head)
        self._starts = _starts(file, len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)
        first = self.at(range(min(len(self), LINES_FOR_FIELDS)))
        self.fields = next((tuple(record) for record in first if isinstance(record, dict)), ())

    def __len__(self) -> int:
        return len(self._starts) - 1

    def at(self, numbers: Sequence[int]) -> list[Any]:
        """Raises OSError where the file is not any more what it was."""
        lines = self._lines(numbers)
        if _stamp(self._file) != self._stamp:
            raise OSError(f"{self._name} was changed while it is read: leave data files alone, and start again")
        return list(map(_parse, lines))

    def _lines(self, numbers: Sequence[int]) -> list[bytes]:
        if isinstance(numbers, range) and numbers.step == 1 and numbers:
            first, stop = numbers[0], numbers[-1] + 1
            if self._starts[stop] - self._starts[first] <= BYTES_AT_ONCE:
                return self._read(first, stop).split(b"\n")[: len(numbers)]
        return [self._read(number, number + 1).removesuffix(b"\n") for number in numbers]

    def _read(self, first: int, stop: int) -> bytes:
        start = self._starts[first]
        return os.pread(self._file.fileno(), self._starts[stop] - start, start)


def _starts(file: BinaryIO, start: int) -> "array[int]":
    """Where each line of a file begins, and where the last one ends; of those from byte `start` on."""
    file.seek(start)
    starts = array("q", [start])
    while lengths := array("q", map(len, itertools.islice(file, LINES_AT_ONCE))):
        starts.extend(itertools.islice(itertools.accumulate(lengths, initial=starts[-1]), 1, None))
        LIFE.sign()
    return starts


def _stamp(file: BinaryIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def _parse(line: bytes) -> Any:
    try:
        return _DECODER.decode(line.decode()) if line.strip() else ValueError("the line is empty")
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8: byte {line[error.start]:#04x} in column {error.start + 1}")
    except json.JSONDecodeError as error:
        return ValueError(f"not valid JSON: {error.msg} (column {error.pos + 1})")
    except RecursionError:
        return ValueError("not readable JSON: nested too deeply")
    except ValueError as error:  # the last part of Python's message is advice to programmers
        return ValueError(f"not readable JSON: {str(error).partition(';')[0]}")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text:.40} is too large")
    return number


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON: write a number, null or text")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)
