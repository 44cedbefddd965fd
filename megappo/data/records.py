"""Records of data files by number, lines of jsonl or rows of parquet, kept as they are and parsed when asked for."""

import codecs
import gzip
import itertools
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megappo.config.data_files import OTHER_KIND, ending
from megappo.data.fields import columns_for

HEAD_BYTES = 4096
"""How much of a file tells what it is."""
LINES_FOR_FIELDS = 100
NO_RECORDS = {
    b"\x1f\x8b": "compressed by gzip: unpack it (gunzip), or end its name in .jsonl.gz",
    b"BZh": "compressed by bzip2: unpack it (bunzip2)",
    b"\xfd7zXZ": "compressed by xz: unpack it (unxz)",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it (unzstd)",
    b"PK\x03\x04": "a zip archive: unpack it (unzip)",
    codecs.BOM_UTF16_LE: "UTF-16: convert it (iconv -f UTF-16 -t UTF-8)",
    codecs.BOM_UTF16_BE: "UTF-16: convert it (iconv -f UTF-16 -t UTF-8)",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: run git lfs pull",
}
"""First bytes -> what the file is, and what to do about it."""


class RecordsError(ValueError):
    """Why a file holds no records, and what to do about it; the message follows the file's name."""


def open_records(file: str, names: Sequence[str] | None) -> "Records":
    """Open a file of one of the `data_files.ENDINGS`.

    Args:
        names: the fields that will be asked for, None for any; parquet reads no others.

    Raises:
        RecordsError: it is of another kind, or holds no record.
        OSError: it cannot be read.
    """
    match ending(file):
        case ".jsonl":
            records: Records = JsonLines(Path(file).read_bytes())
        case ".jsonl.gz":
            records = JsonLines(_unpacked(file))
        case ".parquet":
            records = ParquetRows(file, names)
        case _:
            raise RecordsError(OTHER_KIND)
    if not len(records):
        raise RecordsError("is empty: put prompts in it")
    return records


class JsonLines:
    """The content of a file with one JSON object a line, in UTF-8."""

    unit = "line"

    def __init__(self, content: bytes):
        _refuse_other_kinds(content[:HEAD_BYTES])
        if content.startswith(b"PAR1"):
            raise RecordsError("is parquet: give it a name that ends in .parquet")
        if b"\0" in content[:HEAD_BYTES]:
            raise RecordsError("is binary: expected one JSON object a line, in UTF-8")
        self._lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
        if not self._lines[-1]:
            self._lines.pop()
        if self._lines and self._lines[0].strip() in (b"[", b"{"):
            raise RecordsError("is JSON spread over lines: write one object a line (jq -c)")
        first = self.at(range(min(len(self), LINES_FOR_FIELDS)))
        self.fields = next((tuple(record) for record in first if isinstance(record, dict)), ())

    def __len__(self) -> int:
        return len(self._lines)

    def at(self, numbers: Sequence[int]) -> list[Any]:
        return [_parse(self._lines[number]) for number in numbers]


class ParquetRows:
    """The columns of a parquet file that are asked for."""

    unit = "row"

    def __init__(self, file: str, names: Sequence[str] | None):
        import pyarrow.parquet  # not above: it takes as long as all else that a dry run imports

        with open(file, "rb") as head:
            _refuse_other_kinds(head.read(HEAD_BYTES))
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                self.fields = tuple(table.schema_arrow.names)
                columns = columns_for(names, self.fields)
                self._table = table.read(columns=columns)
                self._num_rows = table.metadata.num_rows
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise RecordsError(f"is not a readable parquet file ({_first_line(error)}): write it again") from error
        twice = [name for name in columns if self.fields.count(name) > 1]
        if twice:
            raise RecordsError(f"has several columns called {twice[0]!r}: rename all but one")

    def __len__(self) -> int:
        return self._num_rows

    def at(self, numbers: Sequence[int]) -> list[Any]:
        if not self._table.num_columns:  # pyarrow takes no rows then
            return [{} for _ in numbers]
        try:
            return self._table.take(list(numbers)).to_pylist()
        except (ValueError, ArithmeticError, NotImplementedError) as error:  # a value that Python cannot hold
            if len(numbers) == 1:
                return [ValueError(f"cannot be read: {_first_line(error)}")]
            return list(itertools.chain.from_iterable(self.at([number]) for number in numbers))


Records = JsonLines | ParquetRows
"""The records of one file: a line or a row (`unit`) each, with the `fields` of the first readable one. `at` gives those
of some numbers, from 0; in place of one that cannot be read the ValueError that says why."""


def _unpacked(file: str) -> bytes:
    try:
        with gzip.open(file) as content:
            return content.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordsError(f"is not a readable gzip file ({_first_line(error)}): write it again") from error


def _refuse_other_kinds(head: bytes) -> None:
    for start, kind in NO_RECORDS.items():
        if head.startswith(start):
            raise RecordsError(f"is {kind}")


def _parse(line: bytes) -> Any:
    try:
        return _DECODER.decode(line.decode()) if line.strip() else ValueError("the line is empty: remove it")
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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
