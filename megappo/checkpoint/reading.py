"""A component's folder read without running code of it: torch and Megatron would unpickle what they find there."""

import io
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from megappo.checkpoint.errors import CheckpointError
from megappo.checkpoint.metadata import read_metadata


class SafeReader(FileSystemReader):
    """torch's reader, but for the pickles: metadata names only what describes tensors, objects are empty."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The folder's metadata, read once."""
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path))
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Everything the plan asks for; torch itself reads tensors with `weights_only`, but not objects."""
        return super().read_data(plan, _Checked(planner))


class _Checked:
    """A planner that is given objects only after a look at them."""

    def __init__(self, planner: LoadPlanner):
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        objects = torch.load(value, weights_only=True)
        # TransformerEngine keeps the scales of FP8 in a pickle of its own here, and would unpickle it.
        if not isinstance(objects, list) or not all(map(_is_empty, objects)):
            raise CheckpointError(
                f"{read_item.storage_index.fqn} is not empty: this version keeps no such states of modules, and does "
                "not load them"
            )
        written = io.BytesIO()
        torch.save(objects, written)
        written.seek(0)
        self._planner.load_bytes(read_item, written)


def _is_empty(found: object) -> bool:
    return found is None or (isinstance(found, torch.Tensor) and found.numel() == 0)


class SafeCommon(TorchCommonLoadStrategy):
    """Megatron's reader of what is not sharded, which leaves it to torch's environment variables what it may hold."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Learning-rate schedule and optimizer settings."""
        return torch.load(Path(checkpoint_dir, COMMON_STATE_FNAME), map_location="cpu", weights_only=True)


# Megatron lets no caller choose its reader.
torch_strategies._get_filesystem_reader = lambda folder, cache_metadata=False: SafeReader(folder)
