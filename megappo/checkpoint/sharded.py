"""One component's dist_checkpointing folder, written and read."""

import io
import os
import pickle
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException  # of any rank; not an Exception
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item
from torch.distributed.checkpoint.storage import WriteResult

from megappo.checkpoint.checksums import new_sum
from megappo.checkpoint.folders import CheckpointError
from megappo.checkpoint.safe_reading import NoCommon, SafeCommon
from megappo.runtime import platform
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.host_memory import HostMemory

# Megatron's own queue of results lives in a further process of each rank, which would import the whole program again:
# seconds, and several hundred MiB. `Writing` makes one for each save, in this process.
filesystem_async._results_queue = queue.Queue()

AsWorld = Callable[[], AbstractContextManager]
"""Makes the component's group the default one: dist_checkpointing is hard-wired to that."""


class HostCopies:
    """Makes the copies of one save after the other, each in the memory of the last copy of its name: fresh memory takes
    longer to be mapped than to be filled."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._memory = HostMemory()

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy on the host, in place of the last one of this name."""
        if name not in self._kept:
            self._kept[name] = self._memory.empty(tensor.shape, tensor.dtype)
        return self._kept[name].copy_(tensor.detach())


class Writing(TorchDistSaveShardedStrategy):
    """A component's folder that is being written; see `begin_sharded`.

    It is Megatron's strategy, with threads that write the files. The processes that Megatron forks instead outlive a
    killed rank, with a copy of its shared memory, and a rank waits for ever for one that is killed.

    Attributes:
        sums: path -> sum of each file that this rank has written.
        error: why this rank's part cannot be written. It is kept for `finish`, as other ranks wait for this one.
        finalize: Megatron's last part of a save, in which the first rank writes the metadata.
    """

    def __init__(self, folder: Path, as_world: AsWorld):
        super().__init__("torch_dist", 1)
        self.sums: dict[str, str] = {}
        self.error: Exception | None = None
        self.finalize: Callable[[], None]
        self._folder = folder
        self._as_world = as_world
        self._writer: FileSystemWriterAsync

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, save_state_dict_ret: Any) -> AsyncRequest:
        self._writer = writer
        writer.finish = partial(self._attempt, writer.finish)
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)

    def write(self) -> None:
        """Write this rank's files and release the state. Any thread may call; `finish` raises the errors."""
        buckets = self._writer.write_buckets
        if buckets:
            self._attempt(self._write_files, buckets)
            for _, _, (objects, tensors) in buckets:
                objects.clear()
                tensors.clear()

    def finish(self) -> None:
        """Complete the folder when `write` has returned everywhere; all ranks of the component together.

        Raises:
            CheckpointError: on every rank, when its part could not be written on any; on the first alone, when its
                metadata could not.
        """
        with self._as_world():
            reasons = [""] * dist.get_world_size()
            dist.all_gather_object(reasons, "" if self.error is None else reason(self.error))
            if not any(reasons):
                self.finalize()
                if dist.get_rank() == 0:
                    config = CheckpointingConfig(self.backend, self.version)
                    self._attempt(save_config, config, str(self._folder))
                reasons = [] if self.error is None else [reason(self.error)]
        if any(reasons):
            why = "; ".join(dict.fromkeys(filter(None, reasons)))
            raise CheckpointError(f"cannot save {self._folder.name} to {self._folder.parent}: {why}") from self.error

    def _attempt(self, write: Callable[..., object], *args: Any) -> None:
        try:
            write(*args)
        except Exception as error:
            self.error = self.error or error

    def _write_files(self, buckets: list[WriteBucket]) -> None:
        with ThreadPoolExecutor(len(buckets)) as threads:
            results = dict(enumerate(threads.map(self._write_file, buckets)))
        self._writer.results_queue = queue.Queue()
        self._writer.results_queue.put(results)

    def _write_file(self, bucket: WriteBucket) -> list[WriteResult]:
        """Write objects and tensors into a file and flush it to the disk."""
        path, name, (objects, tensors) = bucket
        written = []
        with _Stream(io.FileIO(path, "wb")) as stream:
            try:
                for item, data in (*objects, *tensors):
                    written.append(
                        _write_item(self._writer.transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE)
                    )
                stream.flush()
                os.fsync(stream.fileno())
            except RuntimeError as error:
                raise stream.error or error from error
        self.sums[str(path)] = stream.sum.hexdigest()
        return written


class _Stream(io.BufferedWriter):
    """Sums the bytes and keeps the error of a write: torch's file writer only reports that bytes are missing."""

    error: OSError | None = None

    def __init__(self, file: io.FileIO):
        super().__init__(file)
        self.sum = new_sum()

    def write(self, data: Any) -> int:
        heartbeat.beat()
        self.sum.update(data)
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


class _DeferringCommonSave(TorchCommonSaveStrategy):
    """Megatron's writer of unsharded state, which only the first rank calls. It keeps an error until all ranks are
    done: they would wait for this one."""

    error: Exception | None = None

    def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        self.error = None
        try:
            super().save_common(common_state_dict, checkpoint_dir)
        except OSError as error:
            self.error = error
        except RuntimeError as error:  # of torch's file writer, when bytes are missing
            self.error = OSError(f"{checkpoint_dir}/common.pt could not be written to its end; is the disk full?")
            self.error.__cause__ = error


_COMMON = _DeferringCommonSave("torch", 1)
register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, _COMMON)  # `save` takes no other


def begin_sharded(
    state: dict[str, Any],
    folder: Path,
    as_world: AsWorld,
    copies: HostCopies | None,
) -> Writing:
    """Begin to write a component's sharded state into an existing folder; all its ranks together.

    Args:
        copies: makes copies, in place of the last save's, so that training can continue while they are written;
            None: what is on the host is written from where it is.
    """
    writing = Writing(folder, as_world)
    with as_world():
        apply_factories(state)  # before copies are made: of views, as factories cut them, Megatron would make another
        for leaf in nested_values(state):
            if isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
                name = f"{folder.name}/{leaf.key}{leaf.global_offset}"
                leaf.data = copies.copy(name, leaf.data) if copies else leaf.data.cpu()
        request = dist_checkpointing.save(
            state,
            str(folder),
            sharded_strategy=writing,
            async_sharded_save=True,
        )
    # Without the second, which ends in a barrier: the others would wait there for a first rank that fails.
    writing.finalize = request.finalize_fns[0]
    writing.error = _COMMON.error
    return writing


def save_sharded(state: dict[str, Any], folder: Path, as_world: AsWorld) -> dict[str, str]:
    """Write a component's sharded state into an existing folder; all its ranks together.

    Returns:
        `Writing.sums`.
    Raises:
        CheckpointError: as `Writing.finish`.
    """
    writing = begin_sharded(state, folder, as_world, copies=None)
    writing.write()
    writing.finish()
    return writing.sums


def load_sharded(
    state: dict[str, Any],
    folder: Path,
    as_world: AsWorld,
    strict: StrictHandling,
    replicas: dist.ProcessGroup | None = None,
    *,
    weights_only: bool = False,
) -> Any:
    """Load a component's folder like `dist_checkpointing.load`, without running its code; all its ranks together.
    Tensors are loaded in place.

    Args:
        replicas: a group whose ranks share out the reading of what several of them need; None: all of the component's.
        weights_only: do not read the unsharded state.
    Raises:
        CheckpointError: the folder cannot be loaded into this state.
    """
    strategies = {
        "sharded_strategy": _ReadOnce(replicas),
        "common_strategy": NoCommon() if weights_only else SafeCommon(),
    }
    try:
        with as_world():
            return dist_checkpointing.load(state, str(folder), **strategies, strict=strict)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"cannot load {folder.name} from {folder.parent}: {reason(error)}. It is damaged, or of another model than "
            "config.json describes; use another checkpoint"
        ) from error


class _ReadOnce(TorchDistLoadShardedStrategy):
    """Megatron's loading, except that one rank reads a tensor that several ranks of a group need and sends it to the
    others. Megatron 0.16.1's own wrapper for that receives copies on a CPU and holds them all."""

    def __init__(self, replicas: dist.ProcessGroup | None):
        super().__init__()
        self._replicas = replicas

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> dict[str, Any]:
        """Return `sharded_state_dict` with its descriptions replaced by the tensors and objects."""
        plan = determine_main_replica_uniform_distribution(sharded_state_dict, self._replicas, ignore_groups=True)
        readers = plan.main_rank_for_shard if plan else {}
        rank = dist.get_rank(self._replicas)
        values: dict[int, Any] = {}
        held: dict[Any, torch.Tensor] = {}
        read: dict[str, Any] = {}
        for leaf in nested_values(sharded_state_dict):
            shard = None
            if isinstance(leaf, ShardedTensor):
                shard = _sharded_tensor_shard_id(leaf)
                values[id(leaf)] = held[shard] = leaf.data.detach()
            if readers.get(shard, rank) == rank:
                read[str(id(leaf))] = leaf
        loaded = super().load(dict(read), checkpoint_dir)
        if plan:
            self._exchange(plan, held)
        return dict_list_map_outplace(
            lambda leaf: values[id(leaf)] if id(leaf) in values else loaded[str(id(leaf))], sharded_state_dict
        )

    def _exchange(self, plan: ShardDistribution, held: dict[Any, torch.Tensor]) -> None:
        for shard, reader in plan.main_rank_for_shard.items():
            if len(plan.all_ranks_for_shard[shard]) > 1:
                described = plan.shard_to_metadata[shard]
                target = held.get(shard)
                if target is None:  # this rank holds other experts
                    target = torch.empty(described.local_shape, dtype=described.dtype, device=platform.device())
                sent = target.contiguous()
                dist.broadcast(sent, group=self._replicas, group_src=reader)
                target.copy_(sent)


def reason(error: BaseException) -> str:
    """Return the error as text, without torch's tracebacks of all ranks."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return "; ".join(dict.fromkeys(_describe(cause) for cause in causes))


def _describe(cause: BaseException) -> str:
    if isinstance(cause, OSError):
        return f"{cause.filename}: {cause.strerror}" if cause.filename else str(cause.strerror or cause)
    if isinstance(cause, pickle.UnpicklingError):
        return "it holds a pickle of something other than tensors, which is refused: it is damaged, or an attack"
    text = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
    return " ".join(text.split())
