"""Write checkpoints synchronously for tests."""

from pathlib import Path
from typing import Any

from megappo.checkpoint.store import CheckpointStore
from megappo.models.train_engine import TrainedEngine


def save_checkpoint(
    store: CheckpointStore, step: int, components: dict[str, TrainedEngine | None], state: dict[str, Any], **more: Any
) -> Path:
    """Call `CheckpointStore.begin`, with its further arguments, without a copy, and then `finish`."""
    store.begin(step, components, state, **more, in_background=False)
    return store.finish()
