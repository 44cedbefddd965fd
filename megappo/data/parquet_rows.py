"""Rows of parquet by number: a file that is read from its beginning is written anew as blocks that need not be."""

import bisect
import itertools
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from megappo.data.fields import columns_for
from megappo.data.file_heads import HEAD_BYTES, RecordsError, first_line, refuse_other_kinds
from megappo.data.unpacking import Unpack
from megappo.runtime.heartbeat import LIFE

if TYPE_CHECKING:
    import pyarrow

ROWS_OF_BLOCK = 1000


class ParquetRows:
    """The columns of a parquet file that are asked for.

    Rows of parquet are compressed together, a million of them in some files. So these are unpacked, block by block,
    into a file that is mapped into memory: as little of it is in memory as the system likes.

    Args:
        names: of the fields that will be asked for; None: any.
        unpack: gives the file that a function has written.
    Raises:
        RecordsError: it cannot be read.
    """

    unit = "row"

    def __init__(self, file: str, names: Sequence[str] | None, unpack: Unpack):
        import pyarrow.parquet  # not above: it takes as long as all else that a dry run imports

        with open(file, "rb") as opened:
            refuse_other_kinds(opened.read(HEAD_BYTES))
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                self.fields = tuple(table.schema_arrow.names)
                self._num_rows = table.metadata.num_rows
                columns = columns_for(names, self.fields)
            twice = [name for name in columns if self.fields.count(name) > 1]
            if twice:
                raise RecordsError(f"has several columns called {twice[0]!r}: rename all but one")
            self._blocks = (
                _Blocks(unpack(lambda target: _write_blocks(file, columns, target)))
                if columns and self._num_rows
                else None
            )
        except RecordsError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise RecordsError(f"is not a readable parquet file ({first_line(error)}): write it again") from error

    def __len__(self) -> int:
        return self._num_rows

    def at(self, numbers: Sequence[int]) -> list[Any]:
        if self._blocks is None:  # no field that is asked for is there
            return [{} for _ in numbers]
        of_block = itertools.groupby(numbers, key=self._blocks.holding)
        return [row for block, part in of_block for row in self._blocks.rows(block, list(part))]


class _Blocks:
    """Rows as `_write_blocks` writes them: Arrow streams of one batch each, behind each other."""

    def __init__(self, file: BinaryIO):
        import pyarrow

        self._ipc = pyarrow.ipc
        with file:
            self._content = pyarrow.py_buffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        self._places, self._first_rows = [0], [0]
        source = pyarrow.BufferReader(self._content)
        while source.tell() < self._content.size:
            with self._ipc.open_stream(source) as stream:
                self._first_rows.append(self._first_rows[-1] + stream.read_all().num_rows)
            self._places.append(source.tell())

    def holding(self, number: int) -> int:
        """The block with this row."""
        return bisect.bisect_right(self._first_rows, number) - 1

    def rows(self, block: int, numbers: Sequence[int]) -> list[Any]:
        """Rows of a block, by their numbers in the file."""
        start = self._places[block]
        with self._ipc.open_stream(self._content.slice(start, self._places[block + 1] - start)) as stream:
            batch = stream.read_next_batch()
        return _as_python(batch, [number - self._first_rows[block] for number in numbers])


def _write_blocks(file: str, columns: Sequence[str], target: BinaryIO) -> None:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        for group in range(table.num_row_groups):  # of all together it would hold the whole file, compressed
            for batch in table.iter_batches(ROWS_OF_BLOCK, [group], columns):
                block = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(block, batch.schema) as stream:
                    stream.write_batch(batch)
                target.write(block.getvalue())  # not by pyarrow, whose errors do not say that the disk is full
                LIFE.sign()
    pyarrow.default_memory_pool().release_unused()


def _as_python(batch: "pyarrow.RecordBatch", places: list[int]) -> list[Any]:
    try:
        return batch.take(places).to_pylist()
    except (ValueError, ArithmeticError, NotImplementedError) as error:  # a value that Python cannot hold
        if len(places) == 1:
            return [ValueError(f"cannot be read: {first_line(error)}")]
        return [row for place in places for row in _as_python(batch, [place])]
