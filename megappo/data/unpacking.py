"""What a data file holds, written anew so that any record of it can be read: into a file of TMPDIR without a name."""

import errno
import tempfile
from collections.abc import Callable
from typing import BinaryIO

from megappo.data.file_heads import RecordsError

Write = Callable[[BinaryIO], None]
Unpack = Callable[[Write], BinaryIO]
"""Gives a file with what a function writes into it, to be read from its beginning."""


def unpacked(write: Write) -> BinaryIO:
    """A file of this process; it goes with its last reader, however that ends.

    Raises:
        RecordsError: there is no room for it.
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
