"""SHA256SUMS of a checkpoint, in the format of sha256sum. Errors name the files that a disk or a copy has changed.

Imports no torch: the dry run checks state.json.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megappo.checkpoint.folders import STATE, CheckpointError
from megappo.config.text_files import LARGEST_JSON, TextFileError, open_file, read_text
from megappo.runtime.durable_files import sync
from megappo.runtime.heartbeat import heartbeat

if TYPE_CHECKING:
    from megappo.batch.exchange import Exchange

SUMS = "SHA256SUMS"
BLOCK_BYTES = 2**24
"""Read at a time."""
_SHOWN = 3


def new_sum() -> Any:
    """Return a new hashlib object for a file's bytes."""
    return hashlib.sha256()


def write_sums(checkpoint: Path, exchange: "Exchange", known: Mapping[str, str]) -> None:
    """Flush every file of a checkpoint to the disk and write their sums. All ranks call.

    Args:
        known: path -> sum of the files that this rank wrote and flushed. The first rank sums what no rank knows.
    Raises:
        OSError, OtherRankError: a file cannot be read, or SHA256SUMS not written.
    """
    all_known = exchange.merge(known)
    sums = {Path(path).relative_to(checkpoint).as_posix(): digest for path, digest in all_known.items()}

    def write() -> None:
        for name in files_of(checkpoint):
            if name not in sums:
                sync(checkpoint / name)
                sums[name] = file_sum(checkpoint / name)
        path = checkpoint / SUMS
        path.write_text(_text(dict(sorted(sums.items()))), "utf-8")
        sync(path)

    exchange.on_rank_0(write)


def damage(checkpoint: Path, exchange: "Exchange", under: str = "") -> str:
    """Describe the files of a checkpoint that differ from their sums; "" if none does. All ranks share the files.

    Args:
        under: the component to check; "" for all.
    """

    def listed() -> tuple[dict[str, str], list[str], list[str]]:
        try:
            sums = read_sums(checkpoint)
        except CheckpointError as error:
            return {}, [], [str(error)]
        there = files_of(checkpoint)
        missing = [name for name in sums if name not in there]
        return sums, [name for name in (*there, *missing) if name.startswith(under)], []

    sums, names, faults = exchange.on_rank_0(listed)
    for found in exchange.all_gather(altered(checkpoint, sums, names[exchange.rank :: exchange.world_size])):
        faults += found
    shown = faults if len(faults) <= _SHOWN else [*faults[:_SHOWN], "..."]
    return ", ".join(shown)


def refuse_damaged(folder: Path, exchange: "Exchange") -> None:
    """Check a checkpoint, or one component of it, against its sums. Folders without sums are accepted.

    Raises:
        CheckpointError: a file differs; the message names it.
    """
    folder = folder.resolve()
    for checkpoint, under in ((folder, ""), (folder.parent, f"{folder.name}/")):
        fault = damage(checkpoint, exchange, under) if _has_sums(checkpoint) else ""
        if fault:
            raise CheckpointError(f"{checkpoint} is damaged: {fault}; copy it again, or use another checkpoint")


def refuse_altered(checkpoint: Path, name: str) -> None:
    """Check one file of a checkpoint against its sum, in this process alone."""
    for fault in altered(checkpoint, read_sums(checkpoint), [name]) if _has_sums(checkpoint) else ():
        raise CheckpointError(f"{checkpoint} is damaged: {fault}; copy it again, or use another checkpoint")


def altered(checkpoint: Path, sums: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Describe each of these files that differs from its sum. Uses one thread per core: a single one sums more slowly
    than storage reads."""

    def fault(name: str) -> str:
        if name not in sums:
            return f"{name} is not listed in {SUMS}"
        try:
            is_whole = file_sum(checkpoint / name) == sums[name]
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return "" if is_whole else f"{name} is altered or cut off, by its sum in {SUMS}"

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return list(filter(None, threads.map(fault, names)))


def read_sums(checkpoint: Path) -> dict[str, str]:
    """Return file name -> its sum.

    Raises:
        CheckpointError: SHA256SUMS is missing or damaged.
    """
    path = checkpoint / SUMS
    try:
        text = read_text(path, LARGEST_JSON)
    except TextFileError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise CheckpointError(f"{path} cannot be read ({error})") from error
        raise CheckpointError(
            f"{path} is missing, so the other files cannot be checked; if you trust "
            f"them: cd {checkpoint} && find * -type f -exec sha256sum {{}} + > {SUMS}"
        ) from error
    sums: dict[str, str] = {}
    for line in text.splitlines():
        digest, _, name = line.partition("  ")
        sums[name] = digest
    if _text(sums) != text:  # a line has another format
        raise CheckpointError(f"{path} is altered or cut off")
    return sums


def files_of(checkpoint: Path) -> list[str]:
    """List all files except SHA256SUMS, largest first: dealt out in turn, every rank reads about as much."""
    found = [path for path in checkpoint.rglob("*") if not path.is_dir() and path != checkpoint / SUMS]
    found.sort(key=lambda path: (-path.lstat().st_size, path))
    return [path.relative_to(checkpoint).as_posix() for path in found]


def _has_sums(folder: Path) -> bool:
    """Return whether a folder is a checkpoint with sums of its own."""
    return (folder / STATE).is_file() and (folder / SUMS).exists()


def _text(sums: dict[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items())


def file_sum(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    is_small = path.name == STATE or path.suffix == ".yaml"
    digest = new_sum()
    with open_file(path, LARGEST_JSON if is_small else math.inf) as file:
        while block := file.read(BLOCK_BYTES):
            heartbeat.beat()
            digest.update(block)
    return digest.hexdigest()
