"""Checkpoints as tests write them, at once."""

from pathlib import Path
from typing import Any

from megappo.checkpoint.store import Checkpointed, CheckpointStore


def save_checkpoint(
    store: CheckpointStore, step: int, components: dict[str, Checkpointed | None], state: dict[str, Any], **more: Any
) -> Path:
    """`CheckpointStore.begin`, whose further arguments it takes, without a copy, and `finish`."""
    store.begin(step, components, state, **more, in_background=False)
    return store.finish()
