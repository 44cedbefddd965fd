"""Reports of failures: one message, from one rank, for a run; a line for a background thread."""

import errno
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.errors import ActionableError, escaped_lines
from megappo.runtime.interruption import EXIT_LOST_RANK, LAUNCHER

LOST_RANK = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
"""Messages of collectives that another rank has ended."""
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
    errno.EMFILE: "raise the number of open files of a process: ulimit -n 65536",
    errno.ENOMEM: MEMORY,
    errno.EAGAIN: "raise the number of processes and threads of a user: ulimit -u",
}
"""Remedies for errors of the operating system."""
REPORT_SECONDS = 7.0
"""Time that a rank waits for the report of the rank that failed first."""
POLL_SECONDS = 0.05
REPORTED = "failure/exit_code"
"""Key of the store: exit code of the rank that has printed the run's error."""
DEV_NULL = os.open(os.devnull, os.O_WRONLY)  # now: later there may be no descriptor left
FAILED: list[str] = []
"""Names of the threads of this process that an exception has ended, threads of libraries included."""


def report(error: Exception, store: dist.Store, rank: int) -> int:
    """Print the run's first error once, even if every rank meets it or fails because of it.

    A rank that lost another rank prints nothing if that rank has reported, or if the launcher will.

    Args:
        store: torchrun's, shared by all ranks.
    Returns:
        The rank's exit code: the error's own, or EXIT_LOST_RANK if the launcher reports.
    """
    if isinstance(error, ActionableError):
        is_consequence = error.is_consequence
    else:
        is_consequence = any(phrase in str(error) for phrase in LOST_RANK)
    with suppress(dist.DistError):
        with _stderr_closed():  # torch prints pages about a store that is gone, with node 0
            is_first = not is_consequence and store.add("failure/count", 1) == 1
        if not is_first and (code := _reported_code(store)):
            return code
    if is_consequence and LAUNCHER in os.environ:
        return EXIT_LOST_RANK
    if is_consequence:
        message = f"error (rank {rank}): another rank exited without an error message ({error}): see torchrun's report"
    elif isinstance(error, ActionableError):
        message = error.report(rank)
    else:
        message = f"error (rank {rank}): {_explained(error) or ''.join(traceback.format_exception(error)).rstrip()}"
    code = error.exit_code if isinstance(error, ActionableError) else 1
    report_message(message, store, code)
    return code


def report_message(message: str, store: dist.Store, code: int) -> None:
    """Print why the run ends. Ranks that fail because of it print nothing and end with the same exit code."""
    message = escaped_lines(message)  # servers and programs write parts of it
    print(message, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:  # torchrun repeats it at the end of its own report
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # it has been printed; the temporary folder may be what is full
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
    with suppress(dist.DistError), _stderr_closed():
        store.set(REPORTED, str(code))


@contextmanager
def _stderr_closed() -> Iterator[None]:
    try:
        kept = os.dup(2)
    except OSError:  # no descriptor is left, which may be the error to report
        yield
        return
    os.dup2(DEV_NULL, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _reported_code(store: dist.Store) -> int:
    """Return the exit code of the rank that has reported; 0 if none does in time."""
    deadline = time.monotonic() + REPORT_SECONDS
    while True:
        with _stderr_closed():  # not while it sleeps: other threads may have something to print
            if store.check([REPORTED]):
                return int(store.get(REPORTED))
        if time.monotonic() > deadline:
            return 0
        time.sleep(POLL_SECONDS)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 3, 5 and 17 more`."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def _explained(error: Exception) -> str:
    """Return what happened and what to do, if that is known without a traceback; else ""."""
    if isinstance(error, FloatingPointError | MemoryError):
        return str(error)
    if isinstance(error, OSError):
        return _refused(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"{str(error).splitlines()[0]}: {MEMORY}"
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


def report_failed_threads(process: str) -> None:
    """Report each thread of this process that an exception ends from now on, in one line on stderr.

    Args:
        process: what to call this one, such as "rank 3".
    """

    def report_thread(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_type is SystemExit:  # a thread's way to end, for Python's own hook, too
            return
        name = getattr(ended.thread, "name", "that is gone")
        FAILED.append(name)
        frame = traceback.extract_tb(ended.exc_traceback)[-1]
        print(
            f"WARNING ({process}): the background thread {name} ended, and its work is no longer done: "
            f"{ended.exc_type.__name__}: {ended.exc_value} ({frame.filename} line {frame.lineno}); see 'background "
            "thread' in docs/troubleshooting.md",
            file=sys.stderr,
            flush=True,
        )

    threading.excepthook = report_thread
