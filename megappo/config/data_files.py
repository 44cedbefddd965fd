"""The kinds of data files, told by their names."""

from pathlib import Path

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
OTHER_KIND = f"is neither {', '.join(ENDINGS[:-1])} nor {ENDINGS[-1]}: convert it"
"""Follows the name of a file with another ending."""


def ending(file: str) -> str:
    """A data file's ending; "" of a file of another kind."""
    return next((known for known in ENDINGS if file.endswith(known)), "")


def stem(file: str) -> str:
    """A data file's name without folder and ending."""
    return Path(file).name.removesuffix(ending(file))
