"""Reading a component's folder without running its code: torch and Megatron would unpickle what they find."""

import io
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.futures import Future

from megappo.checkpoint.folders import CheckpointError
from megappo.checkpoint.metadata import read_metadata
from megappo.config.text_files import open_file
from megappo.runtime.heartbeat import heartbeat


class SafeReader(FileSystemReader):
    """torch's reader without pickles: metadata may name only descriptions of tensors, and objects must be empty. It
    reads only the requested numbers of a stored tensor; torch's reader reads and holds all of them."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the folder's metadata, which is read once: Megatron reads it twice in a load."""
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path))
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything in the plan, file by file."""
        items_by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items_by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in items_by_file.items():
            with open_file(Path(self.path, name), math.inf) as file:
                for item in items:
                    heartbeat.beat()
                    stored = self._slice_file(file, self.storage_data[item.storage_index])
                    if item.type == LoadItemType.BYTE_IO:
                        planner.load_bytes(item, _empty_objects(stored, item))
                    else:
                        target = planner.resolve_tensor(item).detach()
                        planner.commit_tensor(item, target.copy_(_numbers(stored, item.storage_offsets, item.lengths)))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _numbers(stored: Any, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Read a box of a tensor that torch.save wrote into a part of a file, without the numbers around it.

    Raises:
        CheckpointError: the part is too short for the tensor that it describes.
    """
    meta = torch.load(stored, map_location="meta", weights_only=True)
    box = meta
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        box = box.narrow(dim, offset, length)
    last = sum((length - 1) * stride for length, stride in zip(lengths, meta.stride(), strict=True))
    numbers = torch.empty(1 + last, dtype=meta.dtype)
    # On the meta device torch.load records the position of a tensor's numbers.
    stored.seek(meta.untyped_storage()._checkpoint_offset + box.storage_offset() * meta.itemsize)
    if stored.readinto(numbers.view(torch.uint8).numpy()) != numbers.nbytes:
        raise CheckpointError("a tensor is larger than the part of the file that holds it, which is damaged")
    return numbers.as_strided(lengths, meta.stride())


def _empty_objects(stored: Any, item: ReadItem) -> io.BytesIO:
    """Return the objects of a file after checking them: torch reads tensors with `weights_only`, but not these."""
    content = stored.read()
    objects = torch.load(io.BytesIO(content), weights_only=True)
    # TransformerEngine keeps the scales of FP8 in a pickle of its own here, and would unpickle it.
    if not isinstance(objects, list) or not all(map(_is_empty, objects)):
        raise CheckpointError(
            f"{item.storage_index.fqn} is not empty: this program saves no such module states and does not load them"
        )
    return io.BytesIO(content)


def _is_empty(found: object) -> bool:
    return found is None or (isinstance(found, torch.Tensor) and found.numel() == 0)


class SafeCommon(TorchCommonLoadStrategy):
    """Megatron's reader of unsharded state, with `weights_only`, which Megatron leaves to an environment variable."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return learning-rate schedule and optimizer settings."""
        with open_file(Path(checkpoint_dir, COMMON_STATE_FNAME)) as file:
            return torch.load(file, map_location="cpu", weights_only=True)


class NoCommon(TorchCommonLoadStrategy):
    """Reads no unsharded state: for weights alone. Megatron-LM pickles its command line with it."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return nothing."""
        return {}


# Megatron lets no caller choose its reader.
torch_strategies._get_filesystem_reader = lambda folder, cache_metadata=False: SafeReader(folder)
