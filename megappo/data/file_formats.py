"""Formats of data files: refusing files of another format, and unpacking compressed ones."""

import codecs
import errno
import gzip
import tempfile
import zlib
from collections.abc import Callable
from typing import BinaryIO

from megappo.runtime.heartbeat import heartbeat

HEAD_BYTES = 4096
"""Bytes at the beginning of a file by which its format is known."""
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
BUFFER_BYTES = 2**20

Write = Callable[[BinaryIO], None]
Unpack = Callable[[Write], BinaryIO]
"""Returns a file with what a function writes into it, at its beginning."""


class RecordsError(ValueError):
    """A file holds no records; the message, which follows the file's name, has the reason and the remedy."""


def refuse_other_formats(head: bytes) -> None:
    """Raise RecordsError for the beginning of a file of a known other format."""
    for start, kind in OTHER_FORMATS.items():
        if head.startswith(start):
            raise RecordsError(f"is {kind}")


def refuse_no_json_lines(head: bytes) -> None:
    """Raise RecordsError for the beginning of a file that does not hold one JSON object a line."""
    refuse_other_formats(head)
    if head.startswith(b"PAR1"):
        raise RecordsError("is parquet: give it a name that ends in .parquet")
    if b"\0" in head:
        raise RecordsError("is binary: expected one JSON object a line, in UTF-8")
    if head.removeprefix(codecs.BOM_UTF8).partition(b"\n")[0].strip() in (b"[", b"{"):
        raise RecordsError("is JSON spread over lines: write one object a line (jq -c)")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; its type if it has none."""
    return str(error).partition("\n")[0] or type(error).__name__


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
        file.close()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        folder = tempfile.gettempdir()
        raise RecordsError(f"does not fit, unpacked, into {folder}: set TMPDIR to a folder with more room") from error
    file.seek(0)
    return file


def gunzip(file: str, target: BinaryIO) -> None:
    """Write the content of a gzip file.

    Raises:
        RecordsError: the file is damaged.
    """
    try:
        with gzip.open(file) as content:
            while part := content.read(BUFFER_BYTES):
                target.write(part)
                heartbeat.beat()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RecordsError(f"is not a readable gzip file ({first_line(error)}): write it again") from error
