"""Records of data files by number, lines of jsonl or rows of parquet: read and parsed when they are asked for."""

import gzip
import zlib
from collections.abc import Sequence
from typing import BinaryIO

from megappo.config.data_files import OTHER_KIND, ending
from megappo.data.file_heads import RecordsError, first_line
from megappo.data.json_lines import JsonLines
from megappo.data.parquet_rows import ParquetRows
from megappo.data.unpacking import Unpack, unpacked
from megappo.runtime.heartbeat import LIFE

BUFFER_BYTES = 2**20

Records = JsonLines | ParquetRows
"""The records of one file: a line or a row (`unit`) each, with the `fields` of the first readable one. `at` gives those
of some numbers, from 0; in place of one that cannot be read the ValueError that says why. It is fast of a range."""


def open_records(file: str, names: Sequence[str] | None, unpack: Unpack = unpacked) -> Records:
    """Open a file of one of the `data_files.ENDINGS`.

    Args:
        names: the fields that will be asked for, None for any; parquet reads no others.
        unpack: what any record can be read from is a file of this function where `file` itself is none.

    Raises:
        RecordsError: it is of another kind, or holds no record.
        OSError: it cannot be read.
    """
    match ending(file):
        case ".jsonl":
            records: Records = JsonLines(open(file, "rb", BUFFER_BYTES), file)  # noqa: SIM115
        case ".jsonl.gz":
            records = JsonLines(unpack(lambda target: _gunzip(file, target)), file)
        case ".parquet":
            records = ParquetRows(file, names, unpack)
        case _:
            raise RecordsError(OTHER_KIND)
    if not len(records):
        raise RecordsError("is empty: put prompts in it")
    return records


def _gunzip(file: str, target: BinaryIO) -> None:
    try:
        with gzip.open(file) as content:
            while part := content.read(BUFFER_BYTES):
                target.write(part)
                LIFE.sign()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordsError(f"is not a readable gzip file ({first_line(error)}): write it again") from error
