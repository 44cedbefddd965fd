"""Records of data files by number, lines of jsonl or rows of parquet: read and parsed on request."""

import codecs
import errno
import gzip
import json
import math
import mmap
import os
import tempfile
import weakref
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from megappo.config.sections import OTHER_KIND, ending
from megappo.runtime.heartbeat import heartbeat

if TYPE_CHECKING:
    import pyarrow

HEAD_BYTES = 4096
"""Bytes at the beginning of a file by which its format is known."""
BUFFER_BYTES = 2**20
LINES_FOR_FIELDS = 100
LINES_PER_BEAT = 100_000
ROWS_AT_ONCE = 1000
BYTES_AT_ONCE = 2**24
"""Bytes of rows, which may hold images, that are unpacked at once."""
OTHER_FORMATS = {
    b"\x1f\x8b": "compressed by gzip: unpack it (gunzip), or end its name in .jsonl.gz",
    b"BZh": "compressed by bzip2: unpack it (bunzip2)",
    b"\xfd7zXZ": "compressed by xz: unpack it (unxz)",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it (unzstd)",
    b"PK\x03\x04": "a zip archive: unpack it (unzip)",
    codecs.BOM_UTF16_LE: "UTF-16: convert it (iconv -f UTF-16 -t UTF-8)",
    codecs.BOM_UTF16_BE: "UTF-16: convert it (iconv -f UTF-16 -t UTF-8)",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: run git lfs pull",
}
"""First bytes -> the format, and what to do about it."""

Write = Callable[[BinaryIO], None]
Unpack = Callable[[Write], BinaryIO]
"""Returns a file with what a function writes into it, at its beginning."""


class RecordsError(ValueError):
    """A file holds no records; the message, which follows the file's name, has the reason and the remedy."""


class JsonLines:
    """Records of a file with one JSON object a line, in UTF-8. Memory holds the beginning of each line, 8 bytes.

    Args:
        path: path of the file, for messages.
        file: open; read as long as this object lives, then closed.
    Attributes:
        fields: fields of the first readable record.
    Raises:
        RecordsError: the file is of another format.
    """

    unit = "line"

    def __init__(self, path: str, file: BinaryIO):
        self.path = path
        self._file = file
        weakref.finalize(self, file.close)
        self._stamp = _stamp(file)
        head = file.read(HEAD_BYTES)
        _refuse_other_formats(head)
        _refuse_no_json_lines(head)
        self._starts = _line_starts(file, len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)
        first = self.at(range(min(len(self), LINES_FOR_FIELDS)))
        self.fields: Sequence[str] = next((list(record) for record in first if isinstance(record, dict)), [])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def at(self, numbers: Sequence[int]) -> list[Any]:
        """Return the records of these numbers. Raises OSError if the file has changed since it was opened."""
        if isinstance(numbers, range) and numbers.step == 1 and numbers:
            lines = self._read(numbers[0], numbers[-1] + 1).split(b"\n")[: len(numbers)]
        else:
            lines = [self._read(number, number + 1).removesuffix(b"\n") for number in numbers]
        if _stamp(self._file) != self._stamp:
            raise OSError(f"{self.path} was changed while it is read: leave data files alone, and start again")
        return list(map(_parse, lines))

    def _read(self, first: int, stop: int) -> bytes:
        start = self._starts[first]
        return os.pread(self._file.fileno(), self._starts[stop] - start, start)


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _line_starts(file: BinaryIO, start: int) -> "array[int]":
    """Return the beginning of each line from byte `start` on, and the end of the last one."""
    file.seek(start)
    starts = array("q", [start])
    for line in file:
        start += len(line)
        starts.append(start)
        if len(starts) % LINES_PER_BEAT == 0:
            heartbeat.beat()
    return starts


def _refuse_other_formats(head: bytes) -> None:
    for start, kind in OTHER_FORMATS.items():
        if head.startswith(start):
            raise RecordsError(f"is {kind}")


def _refuse_no_json_lines(head: bytes) -> None:
    if head.startswith(b"PAR1"):
        raise RecordsError("is parquet: give it a name that ends in .parquet")
    if b"\0" in head:
        raise RecordsError("is binary: expected one JSON object a line, in UTF-8")
    first = head.removeprefix(codecs.BOM_UTF8).partition(b"\n")[0].strip()
    if first == b"[" or first.startswith(b"[{"):
        raise RecordsError("is a list in JSON: write one object a line (jq -c '.[]')")
    if first == b"{":
        raise RecordsError("is JSON spread over lines: write one object a line (jq -c .)")


def _parse(line: bytes) -> Any:
    """Return a line's value, or the ValueError that has the reason why it has none."""
    if not line.strip():
        return ValueError("the line is empty")
    try:
        return DECODER.decode(line.decode())
    except json.JSONDecodeError as error:
        return ValueError(f"not valid JSON: {error.msg} (column {error.pos + 1})")
    except (ValueError, RecursionError) as error:
        return ValueError(f"not readable JSON: {error}")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text:.40} is too large")
    return number


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON: write a number, null or text")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name!r:.80} stands twice in one object: drop one")
    return found


DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant, object_pairs_hook=_object)


class ParquetRows:
    """Records of a parquet file, with the columns that hold the requested fields.

    Rows of parquet are compressed together, a million of them in some files. They are unpacked into a file that is
    mapped into memory, of which the system keeps as much in memory as it likes.

    Args:
        names: the requested fields; None: all.
        unpack: returns the file that a function has written.
    Attributes:
        fields: all columns of the file.
    Raises:
        RecordsError: the file cannot be read.
    """

    unit = "row"

    def __init__(self, path: str, names: Sequence[str] | None, unpack: Unpack):
        import pyarrow.parquet  # not above: it takes as long as all other imports of a dry run

        self.path = path
        with open(path, "rb") as opened:
            _refuse_other_formats(opened.read(HEAD_BYTES))
        try:
            with pyarrow.parquet.ParquetFile(path) as table:
                self.fields: Sequence[str] = table.schema_arrow.names
            columns = [name for name in self.fields if names is None or _is_requested(name, names)]
            if len(set(columns)) < len(columns):
                raise RecordsError(f"has several columns of one name among {', '.join(columns)}: rename all but one")
            with unpack(lambda target: _write_arrow(path, columns, target)) as file:
                pyarrow.default_memory_pool().release_unused()
                content = pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            with pyarrow.ipc.open_stream(content) as stream:
                self._table = stream.read_all()  # of views into the map
        except (pyarrow.ArrowException, OSError) as error:
            raise RecordsError(f"is not a readable parquet file ({_first_line(error)}): write it again") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def at(self, numbers: Sequence[int]) -> list[Any]:
        """Return the records of these numbers."""
        if isinstance(numbers, range) and numbers.step == 1:
            return _as_python(self._table.slice(numbers.start, len(numbers)))
        rows = []
        for number in numbers:
            rows += _as_python(self._table.slice(number, 1))
        return rows


def _is_requested(column: str, names: Sequence[str]) -> bool:
    """Return whether a column holds a field of these names, which may be dotted."""
    return any(name == column or name.startswith(f"{column}.") for name in names)


def _write_arrow(path: str, columns: Sequence[str], target: BinaryIO) -> None:
    """Write the columns of a parquet file as an Arrow stream."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, buffer_size=BUFFER_BYTES) as table:
        schema = pyarrow.schema([table.schema_arrow.field(name) for name in columns])
        with pyarrow.ipc.new_stream(target, schema) as stream:
            for group in range(table.num_row_groups):  # of all together it would hold the whole file, compressed
                facts = table.metadata.row_group(group)
                fitting = facts.num_rows * BYTES_AT_ONCE // (facts.total_byte_size + 1)
                for batch in table.iter_batches(max(1, min(ROWS_AT_ONCE, fitting)), [group], columns):
                    stream.write_batch(batch)
                    heartbeat.beat()


def _as_python(rows: "pyarrow.Table") -> list[Any]:
    """Return rows of a table; for one that Python cannot represent the ValueError that has the reason."""
    try:
        return rows.to_pylist()
    except (ValueError, ArithmeticError, NotImplementedError) as error:
        if len(rows) == 1:
            return [ValueError(f"cannot be read: {_first_line(error)}")]
        return [_as_python(rows.slice(number, 1))[0] for number in range(len(rows))]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


Records = JsonLines | ParquetRows
"""Records of one file: a line or a row (`unit`) each. `at` returns the records of some numbers, from 0, fast for a
range; for a record that cannot be read it returns the ValueError with the reason."""


def open_records(path: str, names: Sequence[str] | None, unpack: Unpack | None = None) -> Records:
    """Open a file with one of the `sections.ENDINGS`.

    Args:
        names: the fields to read, None for all; parquet reads no others.
        unpack: returns the file that any record can be read from, where the file itself is compressed.

    Raises:
        RecordsError: it is of another format, or holds no record.
        OSError: it cannot be read.
    """
    unpack = unpack or unpacked
    match ending(path):
        case ".jsonl":
            records: Records = JsonLines(path, open(path, "rb", BUFFER_BYTES))  # noqa: SIM115
        case ".jsonl.gz":
            records = JsonLines(path, unpack(lambda target: _gunzip(path, target)))
        case ".parquet":
            records = ParquetRows(path, names, unpack)
        case _:
            raise RecordsError(OTHER_KIND)
    if not len(records):
        raise RecordsError("is empty: put prompts in it")
    return records


def unpacked(write: Write) -> BinaryIO:
    """Return a file without a name, in TMPDIR, with what `write` writes; it exists as long as a process reads it.

    Raises:
        RecordsError: the disk has no room for it.
    """
    file = tempfile.TemporaryFile(prefix="megappo-data-")  # noqa: SIM115
    try:
        write(file)
        file.flush()
    except OSError as error:
        with suppress(OSError):  # of its buffer, for which there is no room either
            file.close()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        folder = tempfile.gettempdir()
        raise RecordsError(f"does not fit, unpacked, into {folder}: set TMPDIR to a folder with more room") from error
    file.seek(0)
    return file


def _gunzip(path: str, target: BinaryIO) -> None:
    """Write the content of a gzip file.

    Raises:
        RecordsError: the file is damaged.
    """
    try:
        with gzip.open(path) as content:
            while part := content.read(BUFFER_BYTES):
                target.write(part)
                heartbeat.beat()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordsError(f"is not a readable gzip file ({error}): write it again") from error
