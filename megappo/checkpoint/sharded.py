"""One component's dist_checkpointing folder, written and read."""

import errno
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
from megappo.checkpoint.host_copies import HostCopies
from megappo.checkpoint.safe_reading import SafeCommon
from megappo.runtime import platform
from megappo.runtime.heartbeat import heartbeat

# Megatron's own queue of results is one for all saves, and lives in a further process of each rank, which would import
# the whole program again: seconds, and several hundred MiB. Here each save has its own, in this process.
filesystem_async._results_queue = queue.Queue()
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CUT_SHORT = ("unexpected pos", "iostream error")  # in the errors of torch's file writers when bytes are missing


AsWorld = Callable[[], AbstractContextManager]
"""Makes the component's group the default one: dist_checkpointing is hard-wired to that."""


class Writing:
    """A component's folder that is being written; see `begin_sharded`.

    Attributes:
        sums: path -> sum of each file that this rank has written.
    """

    def __init__(
        self,
        folder: Path,
        as_world: AsWorld,
        strategy: "_InThisProcess",
        request: AsyncRequest,
        give_back: Callable[[], None],
    ):
        self.sums = strategy.sums
        self._folder, self._as_world, self._strategy, self._request = folder, as_world, strategy, request
        self._give_back = give_back

    def write(self) -> None:
        """Write this rank's files and release the state. Any thread may call; `finish` raises the errors."""
        if self._request.async_fn is not None:
            self._request.async_fn(*self._request.async_fn_args)
            for _, _, (objects, tensors) in _buckets(self._request):
                objects.clear()
                tensors.clear()
        self._give_back()

    def finish(self) -> None:
        """Complete the folder when `write` has returned everywhere; all ranks of the component together.

        Raises:
            CheckpointError: on every rank, when its part could not be written on any.
        """
        with self._as_world():
            try:
                for step in self._request.finalize_fns[:-1]:
                    step()
                # Megatron's last one, without its barrier: the others would wait there for a first rank that fails.
                if dist.get_rank() == 0:
                    save_config(CheckpointingConfig(self._strategy.backend, self._strategy.version), str(self._folder))
                if self._strategy.error is not None:
                    raise self._strategy.error
            except CheckpointException as error:
                raise _unwritten(self._folder, _of_all_ranks(error)) from error
            except (OSError, RuntimeError) as error:  # of what the first rank writes alone
                if isinstance(error, OSError) or _was_cut_short(str(error)):
                    raise _unwritten(self._folder, reason(error)) from error
                raise


def begin_sharded(state: dict[str, Any], folder: Path, as_world: AsWorld, copies: HostCopies | None) -> Writing:
    """Begin to write a component's sharded state into an existing folder; all its ranks together.

    Args:
        copies: makes a copy of what is written, so that training may go on meanwhile, in memory that it has back when
            all is written; None: what is on the host is written from where it is.
    """
    strategy = _InThisProcess("torch_dist", 1)
    with as_world():
        apply_factories(state)  # before copies are made: of views, as factories cut them, Megatron would make another
        written = [
            leaf
            for leaf in nested_values(state)
            if isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id)
        ]
        for leaf in written:
            leaf.data = leaf.data.cpu() if copies is None else copies.copy(leaf.data)
        give_back = partial(copies.give_back, [leaf.data for leaf in written]) if copies else lambda: None
        request = dist_checkpointing.save(state, str(folder), sharded_strategy=strategy, async_sharded_save=True)
    strategy.error = _COMMON.error
    return Writing(folder, as_world, strategy, request, give_back)


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


def _buckets(request: AsyncRequest) -> list[WriteBucket]:
    """Return the contents of each file of this rank."""
    return [] if request.async_fn is None else request.async_fn_args[1]


def load_sharded(
    state: dict[str, Any],
    folder: Path,
    as_world: AbstractContextManager,
    strict: StrictHandling,
    replicas: dist.ProcessGroup | None = None,
) -> Any:
    """Load a component's folder like `dist_checkpointing.load`, without running its code; all its ranks together.
    Tensors are loaded in place.

    Args:
        replicas: a group whose ranks share out the reading of what several of them need; None: all of the component's.
    """
    with as_world:
        return dist_checkpointing.load(
            state,
            str(folder),
            sharded_strategy=_ReadOnce(replicas),
            common_strategy=SafeCommon(),
            strict=strict,
        )


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
        leaves = {str(number): leaf for number, leaf in enumerate(nested_values(sharded_state_dict))}
        shards = {n: _sharded_tensor_shard_id(leaf) for n, leaf in leaves.items() if isinstance(leaf, ShardedTensor)}
        tensors = {number: leaves[number].data.detach() for number in shards}
        read = {number: leaf for number, leaf in leaves.items() if readers.get(shards.get(number), rank) == rank}
        found = super().load(read, checkpoint_dir)
        if plan:
            self._exchange(plan, {shard: tensors[number] for number, shard in shards.items()})
        values = iter({**leaves, **found, **tensors}.values())
        return dict_list_map_outplace(lambda leaf: next(values), sharded_state_dict)

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


class _DeferringCommonSave(TorchCommonSaveStrategy):
    """Megatron's writer of unsharded state, which only the first rank calls. It keeps an error until all ranks are
    done: they would wait for this one."""

    error: Exception | None = None

    def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        self.error = None
        try:
            super().save_common(common_state_dict, checkpoint_dir)
        except (OSError, RuntimeError) as error:
            self.error = error


_COMMON = _DeferringCommonSave("torch", 1)
register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, _COMMON)  # `save` takes no other


class _InThisProcess(TorchDistSaveShardedStrategy):
    """Megatron's strategy to save, with threads that write the files. The processes that it forks instead outlive a
    killed rank, with a copy of its shared memory, and a rank waits for ever for one that is killed.

    Attributes:
        sums: path -> sum of each file that is written.
        error: of the files that only the first rank writes; kept until all ranks are done.
    """

    def __init__(self, backend: str, version: int):
        super().__init__(backend, version)
        self.sums: dict[str, str] = {}
        self.error: Exception | None = None

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, save_state_dict_ret: Any) -> AsyncRequest:
        if writer.results_queue is not None:
            writer.results_queue = queue.Queue()
        writer.finish = partial(self._write_metadata, writer.finish)
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        return request._replace(async_fn=partial(_write_files, partial(_write_file, writer.transforms, self.sums)))

    def _write_metadata(self, write: Callable[..., None], *args: Any) -> None:
        try:
            write(*args)
        except OSError as error:
            self.error = self.error or error


def _write_files(
    write: Callable[[WriteBucket], list[WriteResult]], rank: int, buckets: list[WriteBucket], results: queue.Queue
) -> None:
    """Write the files that Megatron would write in other processes. Megatron reads the results, by bucket, or an
    exception from the queue."""
    try:
        with ThreadPoolExecutor(len(buckets)) as threads:
            results.put(dict(enumerate(threads.map(write, buckets))))
    except Exception as error:
        results.put(CheckpointError(_describe(error)))


def _write_file(transforms: Any, sums: dict[str, str], bucket: WriteBucket) -> list[WriteResult]:
    """Write objects and tensors into a file and flush it to the disk."""
    path, name, (objects, tensors) = bucket
    with _Stream(io.FileIO(path, "wb")) as stream:
        try:
            written = [
                _write_item(transforms, stream, data, item, name, SerializationFormat.TORCH_SAVE)
                for item, data in (*objects, *tensors)
            ]
            stream.flush()
            os.fsync(stream.fileno())
        except RuntimeError as error:
            raise stream.error or error from error
    sums[str(path)] = stream.sum.hexdigest()
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


def _of_all_ranks(error: CheckpointException) -> str:
    """Return why a save failed, on every rank; Megatron reports it to the first only."""
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason(error))
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def _unwritten(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(f"cannot save {folder.name} to {folder.parent}: {why}")


def _was_cut_short(text: str) -> bool:
    return any(phrase in text for phrase in _CUT_SHORT)


def _describe(cause: BaseException) -> str:
    if isinstance(cause, OSError):
        place = f"{cause.filename}: " if cause.filename else ""
        return f"{place}{cause.strerror or cause}" + ("; make room there" if cause.errno in _FULL else "")
    if isinstance(cause, pickle.UnpicklingError):
        return "it holds a pickle of something other than tensors, which is refused: it is damaged, or an attack"
    text = str(cause).removeprefix("Worker failure: ")  # Megatron's prefix to the error of `_write_files`
    if _was_cut_short(text):
        return "a file could not be written to its end: the disk is full, or files may not grow this large"
    is_described = isinstance(cause, CheckpointError) or text != str(cause)
    return " ".join((text if is_described else f"{type(cause).__name__}: {text}").split())
