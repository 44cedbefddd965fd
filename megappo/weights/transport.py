"""Hands weights to SGLang engines, bucket by bucket, as handles: CUDA IPC on a GPU, shared memory on a CPU.

The payload is what sglang.srt.utils.MultiprocessingSerializer writes for a FlattenedTensorBucket, written here without
SGLang: importing it takes a trainer rank seconds and patches torch. SGLang's SafeUnpickler admits SimpleNamespace.
"""

import base64
import contextlib
import io
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

LOAD_FORMAT = "flattened_bucket"
ALIGNMENT = 8  # bytes; a view as float32 must not start at an odd bfloat16
DEVICE_ARGUMENT = 6  # position of the device among reductions.rebuild_cuda_tensor's arguments

Bucket = Sequence[tuple[str, torch.Tensor]]


class Receiver(Protocol):
    """The part of an engine's client that weight updates need."""

    def begin_weight_update(self) -> None: ...

    def update_weights(self, payloads: Sequence[str], load_format: str) -> None: ...

    def end_weight_update(self) -> None: ...

    def flush_cache(self) -> None: ...


@dataclass(frozen=True)
class SyncStats:
    """What one weight update moved."""

    bytes: int
    seconds: float


def push_buckets(
    receiver: Receiver | None,
    buckets: Iterable[Bucket],
    expected: Mapping[str, tuple[int, ...]],
    *,
    tensor_parallel: int = 1,
) -> SyncStats:
    """Replace an engine's weights; on ranks without an engine only take part in making the buckets.

    SGLang takes a wrong name for a success, so every tensor is checked here, on every rank alike.

    Args:
        receiver: this rank's engine, idle; None where it owns none.
        buckets: full tensors under their Hugging Face names.
        expected: name -> shape of every tensor the engine has.
        tensor_parallel: tensor-parallel ranks of the engine.
    Raises:
        ValueError: a tensor is unknown, sent twice, of the wrong shape, not finite, or missing. The engine's weights
            are then part old, part new, and its update stays open: it must not be used further.
    """
    started, num_bytes = time.perf_counter(), 0
    left = dict(expected)
    if receiver is not None:
        receiver.begin_weight_update()
    for bucket in buckets:
        _check(bucket, left, expected)
        num_bytes += sum(tensor.nbytes for _, tensor in bucket)
        if receiver is not None and bucket:
            _send(receiver, bucket, tensor_parallel)
        del bucket  # before the next one is gathered
    if left:
        names = ", ".join(sorted(left)[:5])
        raise ValueError(f"weight update: {len(left)} of the engine's {len(expected)} tensors were not sent: {names}")
    if receiver is not None:
        receiver.end_weight_update()
        receiver.flush_cache()
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # free the buckets the engine has let go
    return SyncStats(num_bytes, time.perf_counter() - started)


def _check(bucket: Bucket, left: dict[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, tensor in bucket:
        if name not in expected:
            raise ValueError(f"weight update: the engine has no tensor {name}; was it started from another model.path?")
        if name not in left:
            raise ValueError(f"weight update: {name} was sent twice")
        if tuple(tensor.shape) != left[name]:
            raise ValueError(f"weight update: {name} has shape {tuple(tensor.shape)}, but the engine's is {left[name]}")
        if not torch.isfinite(tensor).all():
            raise ValueError(
                f"weight update: {name} holds values that are not finite: the actor's weights are spoiled, or were "
                "damaged on the way; go on from a checkpoint before this step"
            )
        del left[name]


def _send(receiver: Receiver, bucket: Bucket, tensor_parallel: int) -> None:
    """Send one bucket to the engine. Each of its ranks gets a handle of its own: handles are counted."""
    flat, metadata = _flatten(bucket)
    with _shared_by_name():
        payloads = [_serialize({"flattened_tensor": flat, "metadata": metadata}) for _ in range(tensor_parallel)]
        receiver.update_weights(payloads, LOAD_FORMAT)


def _flatten(bucket: Bucket) -> tuple[torch.Tensor, list[SimpleNamespace]]:
    """All tensors' bytes in one uint8 tensor, and where each lies. Source: SGLang's FlattenedTensorBucket."""
    metadata, end = [], 0
    for name, tensor in bucket:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + tensor.nbytes
        place = {"start_idx": start, "end_idx": end, "numel": tensor.nbytes}
        metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **place))
    flat = torch.empty(end, dtype=torch.uint8, device=bucket[0][1].device)
    for (_, tensor), place in zip(bucket, metadata, strict=True):
        flat[place.start_idx : place.end_idx] = tensor.detach().contiguous().flatten().view(torch.uint8)
    return flat, metadata


def _serialize(payload: dict[str, Any]) -> str:
    """Base64 of a pickle in which tensors are handles to memory this process keeps."""
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table = {**pickler.dispatch_table, torch.Tensor: _reduce_tensor}
    pickler.dump(payload)
    return base64.b64encode(buffer.getvalue()).decode()


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """torch's own reduction, but naming a GPU by its UUID: the engine numbers its visible GPUs differently."""
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
    return rebuild, arguments


@contextlib.contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share CPU tensors as named files: torch's default passes descriptors, which an unrelated process cannot take."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
