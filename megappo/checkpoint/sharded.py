"""One component's dist_checkpointing folder, written and read."""

import queue
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException  # of any rank; not an Exception

from megappo.checkpoint.errors import CheckpointError

# Saves here are synchronous, so their results stay in this process. Megatron's own queue lives in a further process of
# each rank, which would import the whole program again: seconds, and several hundred MiB.
filesystem_async._results_queue = queue.Queue()
_CUT_SHORT = "unexpected pos"  # what torch's file writer says when bytes it has written are not there


def save_sharded(state: dict[str, Any], folder: Path, as_world: AbstractContextManager) -> None:
    """Write a component's sharded state into an existing folder; all its ranks together.

    Args:
        as_world: makes the component's group the default one: dist_checkpointing is hard-wired to that.
    Raises:
        CheckpointError: on every rank, when it cannot be written on any.
    """
    try:
        with as_world:
            dist_checkpointing.save(state, str(folder))
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"cannot save {folder.name} to {folder.parent}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """The error in words, without torch's tracebacks of all ranks."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return "; ".join(dict.fromkeys(_said(cause) for cause in causes))


def _said(cause: BaseException) -> str:
    if _CUT_SHORT in str(cause):
        return "a file could not be written to its end: the disk is full, or files may not grow this large"
    return f"{type(cause).__name__}: {cause}"
