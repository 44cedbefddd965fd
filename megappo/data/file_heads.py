"""What the first bytes of a file tell: that it holds no records, and what to do about it."""

import codecs

HEAD_BYTES = 4096
"""How much of a file tells what it is."""
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


def refuse_other_kinds(head: bytes) -> None:
    """See that a file that begins so may hold records.

    Raises:
        RecordsError: it is of a known other kind.
    """
    for start, kind in NO_RECORDS.items():
        if head.startswith(start):
            raise RecordsError(f"is {kind}")


def refuse_no_lines(head: bytes) -> None:
    """See that a file that begins so may hold a JSON object a line.

    Raises:
        RecordsError: it is of another kind.
    """
    refuse_other_kinds(head)
    if head.startswith(b"PAR1"):
        raise RecordsError("is parquet: give it a name that ends in .parquet")
    if b"\0" in head:
        raise RecordsError("is binary: expected one JSON object a line, in UTF-8")
    if head.removeprefix(codecs.BOM_UTF8).partition(b"\n")[0].strip() in (b"[", b"{"):
        raise RecordsError("is JSON spread over lines: write one object a line (jq -c)")


def first_line(error: Exception) -> str:
    """Of its message; its type where it has none."""
    return str(error).partition("\n")[0] or type(error).__name__
