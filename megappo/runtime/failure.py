"""The report of a run that fails: one message, from one rank."""

import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist

from megappo.errors import ActionableError
from megappo.runtime.lifetime import EXIT_LOST_RANK, LAUNCHER

LOST_RANK = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
"""Messages of collectives that another rank has ended."""
TIMED_OUT = ("Timed out waiting", "wait timeout after")
"""Messages of collectives, and of the store, that have waited for too long."""
MEMORY = "lower max_tokens_per_micro_batch, or see 'out of memory' in docs/troubleshooting.md"
RESUME = "start again: the run resumes from its newest checkpoint"
REMEDIES = {
    errno.ENOSPC: f"make room on that disk, then {RESUME}",
    errno.EDQUOT: f"make room within your quota, then {RESUME}",
    errno.EROFS: "choose a trainer.output_dir (or TMPDIR) that can be written",
    errno.EACCES: "let this user read and write there, or choose another path",
    errno.EPERM: "let this user read and write there, or choose another path",
    errno.ESTALE: f"the folder was moved or its file server restarted: mount it again, then {RESUME}",
    errno.EIO: f"the disk or the file server failed (see dmesg): once it works again, {RESUME}",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the number of open files of a process: ulimit -n 65536",
    errno.ENFILE: "the machine has too many open files",
    errno.ENOMEM: MEMORY,
    errno.EAGAIN: "raise the number of processes and threads of a user: ulimit -u",
}
"""Remedies for errors of the operating system."""
FAILURE_SECONDS = 3.0
"""Time within which all ranks that waited in a collective fail once its timeout is over."""
REPORT_SECONDS = FAILURE_SECONDS + 4.0
"""Time that a rank waits for the report of the rank that failed first."""
POLL_SECONDS = 0.05
REPORTED = "failure/exit_code"
"""Key of the store: exit code of the rank that has printed the run's error."""
DEV_NULL = os.open(os.devnull, os.O_WRONLY)  # now: later there may be no descriptor left


def report(error: Exception, store: dist.Store, rank: int, world_size: int) -> int:
    """Print the run's first error once, even if every rank meets it or fails because of it.

    A rank that lost another rank prints nothing if that rank has reported, or if the launcher will.

    Args:
        store: torchrun's, shared by all ranks.
    Returns:
        The rank's exit code: the error's own, or EXIT_LOST_RANK if the launcher reports.
    """
    is_consequence = _is_consequence(error)
    silent: list[int] = []
    try:
        _quietly(store.set, f"failure/{rank}", "")
        if is_consequence and (code := _reported_code(store)):
            return code
        if is_consequence and LAUNCHER in os.environ:
            return EXIT_LOST_RANK
        if _quietly(store.add, "failure/count", 1) > 1 and (code := _reported_code(store)):
            return code
        if _is_timeout(error):
            silent = _silent_ranks(store, world_size)
    except dist.DistError:  # torchrun's store is gone, and node 0 with it
        if is_consequence and LAUNCHER in os.environ:
            return EXIT_LOST_RANK
    message = f"error (rank {rank}): {_waited(error, silent)}" if silent else _message(error, rank)
    code = error.exit_code if isinstance(error, ActionableError) else 1
    report_message(message, store, code)
    return code


def report_message(message: str, store: dist.Store, code: int) -> None:
    """Print why the run ends. Ranks that fail because of it print nothing and end with the same exit code."""
    print(message, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:  # torchrun repeats it at the end of its own report
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # it has been printed; the temporary folder may be what is full
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
    with suppress(dist.DistError):
        _quietly(store.set, REPORTED, str(code))


def _quietly(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a store without standard error: torch prints pages about a store that is gone."""
    try:
        kept = os.dup(2)
    except OSError:  # no descriptor is left, which may be the error to report
        return call(*arguments)
    os.dup2(DEV_NULL, 2)
    try:
        return call(*arguments)
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _reported_code(store: dist.Store) -> int:
    """Return the exit code of the rank that has reported; 0 if none does in time."""
    deadline = time.monotonic() + REPORT_SECONDS
    while not _quietly(store.check, [REPORTED]):
        if time.monotonic() > deadline:
            return 0
        time.sleep(POLL_SECONDS)
    return int(_quietly(store.get, REPORTED))


def _is_consequence(error: Exception) -> bool:
    if isinstance(error, ActionableError):
        return error.is_consequence
    return any(phrase in str(error) for phrase in LOST_RANK)


def _is_timeout(error: Exception) -> bool:
    if type(error) not in (RuntimeError, dist.DistBackendError, dist.DistStoreError):
        return False
    return any(phrase in str(error) for phrase in TIMED_OUT)


def _silent_ranks(store: dist.Store, world_size: int) -> list[int]:
    """Return the ranks that have not failed as well, though a collective waits for all of its members alike."""
    time.sleep(FAILURE_SECONDS)
    return [rank for rank in range(world_size) if not _quietly(store.check, [f"failure/{rank}"])]


def _waited(error: Exception, silent: list[int]) -> str:
    return (
        "waited for longer than trainer.process_group_timeout_seconds for an answer of "
        f"{name_ranks(silent)} ({error}): it was stopped, hangs, or needs longer for a step than that"
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 3, 5 and 17 more`."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def _message(error: Exception, rank: int) -> str:
    if _is_consequence(error):
        return f"error (rank {rank}): another rank exited without an error message ({error}): see torchrun's report"
    if isinstance(error, ActionableError):
        return error.report(rank)
    return f"error (rank {rank}): {_explained(error) or ''.join(traceback.format_exception(error)).rstrip()}"


def _explained(error: Exception) -> str:
    """Return what happened and what to do, if that is known without a traceback; else ""."""
    if isinstance(error, FloatingPointError | MemoryError):
        return str(error)
    if isinstance(error, OSError):
        return _refused(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"{str(error).splitlines()[0]}: {MEMORY}"
    if isinstance(error, httpx.HTTPError):
        return f"a request to an SGLang engine failed ({error!r}): see engines/engine_N.log in trainer.output_dir"
    refused = error.__cause__ or error.__context__
    if isinstance(refused, OSError) and refused.errno in REMEDIES:
        return f"{_refused(refused)} ({type(error).__name__}: {error})"
    return ""


def _refused(error: OSError) -> str:
    """Return an operating system's error with its path, or where in the program it was raised, and the remedy."""
    if error.errno is None:  # raised by this program, with a message of its own
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = error.filename or f"in {frame.name}, {frame.filename} line {frame.lineno}"
    remedy = REMEDIES.get(error.errno)
    return f"{error.strerror}: {where}: {remedy}" if remedy else f"{error.strerror}: {where}"
