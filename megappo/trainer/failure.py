"""How a run that fails says so: one message, from one rank."""

import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist

from megappo.batch.exchange import LOST_RANK, OtherRankError
from megappo.batch.files import RowsFileError
from megappo.checkpoint.errors import CheckpointError
from megappo.config.errors import ConfigError
from megappo.config.text_files import TextFileError
from megappo.engines.client import EngineError
from megappo.runtime.lifetime import EXIT_CONFIG, EXIT_LOST_RANK, LAUNCHER
from megappo.userland.environment_process import EnvironmentFault
from megappo.userland.pool import RewardError
from megappo.weights.safetensors_io import WeightsError

EXPLAINED = (
    *(ConfigError, TextFileError, WeightsError, CheckpointError, EngineError, RewardError, EnvironmentFault),
    *(RowsFileError, FloatingPointError, MemoryError),
)
"""Errors whose message says all; others come with a traceback."""
MEMORY = "lower max_tokens_per_micro_batch, or see 'out of memory' in docs/troubleshooting.md"
GO_ON = "start again: the run goes on from its newest checkpoint"
REMEDIES = {
    errno.ENOSPC: f"make room on that disk, then {GO_ON}",
    errno.EDQUOT: f"make room within your quota, then {GO_ON}",
    errno.EROFS: "choose a trainer.output_dir (or TMPDIR) that can be written",
    errno.EACCES: "let this user read and write there, or choose another path",
    errno.EPERM: "let this user read and write there, or choose another path",
    errno.ESTALE: f"the folder was moved or its file server restarted: mount it again, then {GO_ON}",
    errno.EIO: f"the disk or the file server failed (see dmesg): once it is well, {GO_ON}",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the number of open files of a process: ulimit -n 65536",
    errno.ENFILE: "the machine has too many open files",
    errno.ENOMEM: MEMORY,
    errno.EAGAIN: "raise the number of processes and threads of a user: ulimit -u",
}
"""What to do about what the operating system refuses."""
TIMED_OUT = ("Timed out waiting", "wait timeout after")
"""How a collective, or the store, says that it has waited for too long."""
ANSWER_SECONDS = 3.0
"""How long after a collective's timeout the ranks that waited in it have all said so."""
REPORT_SECONDS = ANSWER_SECONDS + 4.0
"""How long a rank waits for the rank that failed first to say why."""

POLL_SECONDS = 0.05
NOWHERE = os.open(os.devnull, os.O_WRONLY)  # now: later there may be no descriptor left


def report(error: Exception, store: dist.Store, rank: int, world_size: int) -> int:
    """Print the run's first error, once, though every rank may meet it or fail in its wake.

    A rank that lost another which gave no reason is silent where the launcher knows more.

    Args:
        store: torchrun's, shared by all ranks.
    Returns:
        The rank's exit code: 2 for a config that cannot work, else 1; EXIT_LOST_RANK if it was silent.
    """
    with suppress(dist.DistError):
        _quietly(store.set, f"failed/{rank}", "")
    consequence = _is_consequence(error)
    try:
        if consequence and (code := _told(store)):
            return code
        if consequence and LAUNCHER in os.environ:
            return EXIT_LOST_RANK
        if _quietly(store.add, "errors", 1) > 1 and (code := _told(store)):
            return code
        silent = _silent_ranks(store, world_size) if _is_timeout(error) else []
    except dist.DistError:  # torchrun's store is gone, and node 0 with it
        if consequence and LAUNCHER in os.environ:
            return EXIT_LOST_RANK
        silent = []
    code = EXIT_CONFIG if isinstance(error, ConfigError) else 1
    tell(f"error (rank {rank}): {_waited(error, silent)}" if silent else _message(error, rank), store, code)
    return code


def tell(message: str, store: dist.Store, code: int) -> None:
    """Print why the run ends, so that ranks that fail in its wake keep silent and end with the same exit code."""
    _print(message)
    with suppress(dist.DistError):
        _quietly(store.set, "told", str(code))


def _quietly(call: Callable[..., Any], *arguments: Any) -> Any:
    """A call of the store: of one that is gone torch prints pages of its own, which would hide the one line."""
    try:
        kept = os.dup(2)
    except OSError:  # no descriptor is left, which may be the error that is told
        return call(*arguments)
    os.dup2(NOWHERE, 2)
    try:
        return call(*arguments)
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _told(store: dist.Store) -> int:
    """The exit code of the rank that told, 0 if none does. It is waited for: torchrun ends all ranks with the first."""
    deadline = time.monotonic() + REPORT_SECONDS
    while not _quietly(store.check, ["told"]):
        if time.monotonic() > deadline:
            return 0
        time.sleep(POLL_SECONDS)
    return int(_quietly(store.get, "told"))


def _print(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:  # torchrun repeats it at the end of its own report
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # it has been said; the temporary folder may be what is full
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))


def _is_consequence(error: Exception) -> bool:
    return isinstance(error, OtherRankError) or any(phrase in str(error) for phrase in LOST_RANK)


def _is_timeout(error: Exception) -> bool:
    return type(error) in (RuntimeError, dist.DistBackendError, dist.DistStoreError) and any(
        phrase in str(error) for phrase in TIMED_OUT
    )


def _silent_ranks(store: dist.Store, world_size: int) -> list[int]:
    """Ranks that have not failed as well, though a collective waits for all of its members alike."""
    time.sleep(ANSWER_SECONDS)
    return [rank for rank in range(world_size) if not _quietly(store.check, [f"failed/{rank}"])]


def _waited(error: Exception, silent: list[int]) -> str:
    ranks = ", ".join(map(str, silent[:8])) + (f" and {len(silent) - 8} more" if len(silent) > 8 else "")
    return (
        f"waited for longer than trainer.process_group_timeout_seconds for an answer of rank {ranks} ({error}): it was "
        "stopped, hangs, or needs longer for a step than that"
    )


def _message(error: Exception, rank: int) -> str:
    if isinstance(error, ConfigError):
        return "\n".join(f"error: {line}" for line in error.errors)
    if _is_consequence(error):
        return f"error (rank {rank}): another rank ended without a word ({error}): see how in torchrun's report"
    return f"error (rank {rank}): {_explained(error) or ''.join(traceback.format_exception(error)).rstrip()}"


def _explained(error: Exception) -> str:
    """What happened and what to do, where that can be told without a traceback; else ""."""
    if isinstance(error, EXPLAINED):
        return str(error)
    if isinstance(error, OSError):
        return _refused(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"{str(error).splitlines()[0]}: {MEMORY}"
    if isinstance(error, httpx.HTTPError):
        return f"talking to an SGLang engine failed ({error!r}): see engines/engine_N.log in trainer.output_dir"
    refused = error.__cause__ or error.__context__
    if isinstance(refused, OSError) and refused.errno in REMEDIES:
        return f"{_refused(refused)} ({type(error).__name__}: {error})"
    return ""


def _refused(error: OSError) -> str:
    """An operating system's error with its path, or where in the program it was met, and the remedy."""
    if error.errno is None:  # one of ours: its message says all
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = error.filename or f"in {frame.name}, {frame.filename} line {frame.lineno}"
    remedy = REMEDIES.get(error.errno, "")
    return f"{error.strerror}: {where}" + (f": {remedy}" if remedy else "")
