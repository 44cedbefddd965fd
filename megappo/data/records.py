"""Records of data files by number, lines of jsonl or rows of parquet: read and parsed on request."""

import bisect
import codecs
import itertools
import json
import math
import mmap
import os
import weakref
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from megappo.config.data_section import OTHER_KIND, ending
from megappo.data.file_formats import (
    BUFFER_BYTES,
    HEAD_BYTES,
    RecordsError,
    Unpack,
    first_line,
    gunzip,
    refuse_no_json_lines,
    refuse_other_formats,
    unpacked,
)
from megappo.runtime.heartbeat import heartbeat

if TYPE_CHECKING:
    import pyarrow

LINES_FOR_FIELDS = 100
LINES_AT_ONCE = 100_000
"""Lines that are scanned for their beginnings between two heartbeats."""
BYTES_AT_ONCE = 2**26
"""Consecutive lines of up to so many bytes are read at once."""
ROWS_OF_BLOCK = 1000


class JsonLines:
    """Records of a file with one JSON object a line, in UTF-8. Memory holds the beginning of each line, 8 bytes.

    Args:
        file: open; read as long as this object lives, then closed.
        name: of the file, for messages.
    Raises:
        RecordsError: the file is of another format.
    """

    unit = "line"

    def __init__(self, file: BinaryIO, name: str):
        self._file, self._name = file, name
        weakref.finalize(self, file.close)
        self._stamp = _stamp(file)
        head = file.read(HEAD_BYTES)
        refuse_no_json_lines(head)
        self._starts = _line_starts(file, len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)
        first = self.at(range(min(len(self), LINES_FOR_FIELDS)))
        self.fields = next((tuple(record) for record in first if isinstance(record, dict)), ())

    def __len__(self) -> int:
        return len(self._starts) - 1

    def at(self, numbers: Sequence[int]) -> list[Any]:
        """Return the records of these numbers. Raises OSError if the file has changed since it was opened."""
        is_range = isinstance(numbers, range) and numbers.step == 1 and len(numbers) > 0
        if is_range and self._starts[numbers[-1] + 1] - self._starts[numbers[0]] <= BYTES_AT_ONCE:
            lines = self._read(numbers[0], numbers[-1] + 1).split(b"\n")[: len(numbers)]
        else:
            lines = [self._read(number, number + 1).removesuffix(b"\n") for number in numbers]
        if _stamp(self._file) != self._stamp:
            raise OSError(f"{self._name} was changed while it is read: leave data files alone, and start again")
        return list(map(_parse, lines))

    def _read(self, first: int, stop: int) -> bytes:
        start = self._starts[first]
        return os.pread(self._file.fileno(), self._starts[stop] - start, start)


def _line_starts(file: BinaryIO, start: int) -> "array[int]":
    """Return the beginning of each line from byte `start` on, and the end of the last one."""
    file.seek(start)
    starts = array("q", [start])
    while lengths := array("q", map(len, itertools.islice(file, LINES_AT_ONCE))):
        starts.extend(itertools.islice(itertools.accumulate(lengths, initial=starts[-1]), 1, None))
        heartbeat.beat()
    return starts


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _parse(line: bytes) -> Any:
    """Return a line's value, or the ValueError that has the reason why it has none."""
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


class ParquetRows:
    """Records of a parquet file, with the columns that hold the requested fields.

    Rows of parquet are compressed together, a million of them in some files. They are unpacked, block by block, into a
    file that is mapped into memory, of which the system keeps as much in memory as it likes.

    Args:
        names: the requested fields; None: all.
        unpack: returns the file that a function has written.
    Raises:
        RecordsError: the file cannot be read.
    """

    unit = "row"

    def __init__(self, file: str, names: Sequence[str] | None, unpack: Unpack):
        import pyarrow.parquet  # not above: it takes as long as all other imports of a dry run

        with open(file, "rb") as opened:
            refuse_other_formats(opened.read(HEAD_BYTES))
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                self.fields = tuple(table.schema_arrow.names)
                self._num_rows = table.metadata.num_rows
            columns = _columns_for(names, self.fields)
            repeated = [name for name in columns if self.fields.count(name) > 1]
            if repeated:
                raise RecordsError(f"has several columns called {repeated[0]!r}: rename all but one")
            self._has_columns = bool(columns)
            if columns and self._num_rows:
                self._map_blocks(unpack(lambda target: _write_blocks(file, columns, target)))
        except RecordsError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise RecordsError(f"is not a readable parquet file ({first_line(error)}): write it again") from error

    def __len__(self) -> int:
        return self._num_rows

    def at(self, numbers: Sequence[int]) -> list[Any]:
        """Return the records of these numbers; {} each where the file has no requested field."""
        if not self._has_columns:
            return [{} for _ in numbers]
        rows = []
        for block, of_block in itertools.groupby(numbers, key=self._block_with):
            first = self._first_rows[block]
            rows += _as_python(self._read_block(block), [number - first for number in of_block])
        return rows

    def _map_blocks(self, file: BinaryIO) -> None:
        """Map a file of `_write_blocks` into memory and find the blocks: their first bytes and rows."""
        import pyarrow

        with file:
            self._content = pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        self._places, self._first_rows = [0], [0]
        source = pyarrow.BufferReader(self._content)
        while source.tell() < self._content.size:
            with pyarrow.ipc.open_stream(source) as stream:
                self._first_rows.append(self._first_rows[-1] + stream.read_all().num_rows)
            self._places.append(source.tell())

    def _block_with(self, number: int) -> int:
        return bisect.bisect_right(self._first_rows, number) - 1

    def _read_block(self, block: int) -> "pyarrow.RecordBatch":
        import pyarrow

        start, stop = self._places[block : block + 2]
        with pyarrow.ipc.open_stream(self._content.slice(start, stop - start)) as stream:
            return stream.read_next_batch()


def _columns_for(names: Sequence[str] | None, columns: Sequence[str]) -> list[str]:
    """Return the columns of a table that hold fields of these names, which may be dotted; None: all."""
    if names is None:
        return list(columns)
    holders = [name if name in columns else name.partition(".")[0] for name in names]
    return [name for name in dict.fromkeys(holders) if name in columns]


def _write_blocks(file: str, columns: Sequence[str], target: BinaryIO) -> None:
    """Write the columns as Arrow streams of one batch each, one after the other."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        for group in range(table.num_row_groups):  # of all together it would hold the whole file, compressed
            for batch in table.iter_batches(ROWS_OF_BLOCK, [group], columns):
                block = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(block, batch.schema) as stream:
                    stream.write_batch(batch)
                target.write(block.getvalue())  # not by pyarrow, whose errors hide that the disk is full
                heartbeat.beat()
    pyarrow.default_memory_pool().release_unused()


def _as_python(batch: "pyarrow.RecordBatch", places: list[int]) -> list[Any]:
    """Return rows of a batch; for one that Python cannot represent the ValueError that has the reason."""
    try:
        return batch.take(places).to_pylist()
    except (ValueError, ArithmeticError, NotImplementedError) as error:
        if len(places) == 1:
            return [ValueError(f"cannot be read: {first_line(error)}")]
        return [row for place in places for row in _as_python(batch, [place])]


Records = JsonLines | ParquetRows
"""Records of one file: a line or a row (`unit`) each, with the `fields` of the first readable one. `at` returns those
of some numbers, from 0, fast for a range; for one that cannot be read the ValueError that has the reason."""


def open_records(file: str, names: Sequence[str] | None, unpack: Unpack = unpacked) -> Records:
    """Open a file with one of the `data_files.ENDINGS`.

    Args:
        names: the fields to read, None for all; parquet reads no others.
        unpack: returns the file that any record can be read from, where `file` itself is compressed.

    Raises:
        RecordsError: it is of another format, or holds no record.
        OSError: it cannot be read.
    """
    match ending(file):
        case ".jsonl":
            records: Records = JsonLines(open(file, "rb", BUFFER_BYTES), file)  # noqa: SIM115
        case ".jsonl.gz":
            records = JsonLines(unpack(lambda target: gunzip(file, target)), file)
        case ".parquet":
            records = ParquetRows(file, names, unpack)
        case _:
            raise RecordsError(OTHER_KIND)
    if not len(records):
        raise RecordsError("is empty: put prompts in it")
    return records
