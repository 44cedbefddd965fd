"""Write checkpoints synchronously, and load them, for tests."""

from pathlib import Path
from typing import Any

from megappo.checkpoint.folders import read_state
from megappo.checkpoint.store import CheckpointStore
from megappo.models.train_engine import TrainedEngine


def save_checkpoint(
    store: CheckpointStore, step: int, components: dict[str, TrainedEngine | None], state: dict[str, Any], **more: Any
) -> Path:
    """Call `CheckpointStore.begin`, with its further arguments, without a copy, and then `finish`."""
    store.begin(step, components, state, **more, in_background=False)
    return store.finish()


def load_checkpoint(store: CheckpointStore, path: Path, components: dict[str, TrainedEngine | None]) -> dict[str, Any]:
    """Call `CheckpointStore.load`, and return the trainer's state."""
    store.load(path, components)
    return read_state(path)
