"""How a run that fails says so: one message, from one rank."""

import json
import os
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megappo.checkpoint.errors import CheckpointError
from megappo.config.errors import ConfigError
from megappo.placement.exchange import LOST_RANK, OtherRankError
from megappo.rewards.pool import RewardError
from megappo.rollout.client import EngineError
from megappo.weights.safetensors_io import WeightsError

EXPLAINED = (
    *(ConfigError, WeightsError, CheckpointError, EngineError, RewardError),
    *(FloatingPointError, FileExistsError, FileNotFoundError, PermissionError, MemoryError),
)
"""Errors whose message says all; others come with a traceback."""
REPORT_SECONDS = 5.0
"""How long a rank waits for the rank that failed first to say why."""


def report(error: Exception, store: dist.Store, rank: int) -> None:
    """Print the run's first error, once, though every rank may meet it or fail in its wake.

    Args:
        store: torchrun's, shared by all ranks.
    """
    if not _is_ours_to_tell(error, store):
        return
    message = _message(error, rank)
    print(message, file=sys.stderr, flush=True)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun repeats it at the end of its own report
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        record = {"message": {"message": message, "extraInfo": details}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(record))
    with suppress(dist.DistError):
        store.set("told", "yes")


def _is_ours_to_tell(error: Exception, store: dist.Store) -> bool:
    """Whether no other rank tells. As torchrun ends all ranks as soon as one has ended, that one is waited for."""
    try:
        if _is_consequence(error) and _is_told(store):
            return False
        return store.add("errors", 1) == 1 or not _is_told(store)
    except dist.DistError:  # torchrun's store is gone
        return True


def _is_told(store: dist.Store) -> bool:
    try:
        store.wait(["told"], timedelta(seconds=REPORT_SECONDS))
    except dist.DistStoreError:
        return False
    return True


def _is_consequence(error: Exception) -> bool:
    return isinstance(error, OtherRankError) or any(phrase in str(error) for phrase in LOST_RANK)


def _message(error: Exception, rank: int) -> str:
    if isinstance(error, ConfigError):
        return "\n".join(f"error: {line}" for line in error.errors)
    if _is_consequence(error):
        return f"error (rank {rank}): another rank ended without a word ({error}): see how in torchrun's report"
    explained = str(error) if isinstance(error, EXPLAINED) else "".join(traceback.format_exception(error)).rstrip()
    return f"error (rank {rank}): {explained}"
