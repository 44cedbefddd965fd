"""Weights for an engine on the same GPUs, as handles to this rank's memory: CUDA IPC; on a CPU, shared memory.

The payload is what sglang.srt.utils.MultiprocessingSerializer writes for a FlattenedTensorBucket, written here without
SGLang: importing it takes a trainer rank seconds and patches torch. SGLang's SafeUnpickler admits SimpleNamespace.
"""

import base64
import contextlib
import io
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing import reductions

from megappo import platform
from megappo.sync.handover import Receiver, Update
from megappo.weights.buckets import Bucket

LOAD_FORMAT = "flattened_bucket"
DEVICE_ARGUMENT = 6  # position of the device among reductions.rebuild_cuda_tensor's arguments


class HandleSender(Update):
    """Hands buckets to an engine of `tensor_parallel` ranks. The rank is the actor's, and owns the engine.

    On a CPU the engine also reads tensors where the model has them: the first time they are moved into shared memory.
    On a GPU a copy costs less than a handle for every tensor.
    """

    def __init__(self, receiver: Receiver, tensor_parallel: int):
        super().__init__(receiver)
        self.tensor_parallel = tensor_parallel
        self.reads_in_place = not platform.has_cuda()
        self._buffers: list[torch.Tensor] = []
        if self.reads_in_place:  # torch's default passes descriptors, which an unrelated process cannot take
            torch.multiprocessing.set_sharing_strategy("file_system")

    def buffer(self, size: int) -> torch.Tensor | None:
        """On a CPU shared memory, kept from sync to sync: fresh pages cost more time than the copy into them."""
        if platform.has_cuda():
            return None
        if len(self._buffers) < 2:
            self._buffers.insert(0, _shared_memory(size))
        else:
            self._buffers.reverse()
        if len(self._buffers[0]) < size:
            self._buffers[0] = _shared_memory(size)
        return self._buffers[0][:size]

    def send(self, bucket: Bucket, flat: torch.Tensor | None) -> None:
        if flat is None:
            raise ValueError("an engine that takes handles must be owned by one of the actor's ranks")
        self._send({"flattened_tensor": flat, "metadata": _places(bucket)}, LOAD_FORMAT)

    def share(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        with _room(sum(tensor.nbytes for _, tensor in tensors)):
            for _, tensor in tensors:
                tensor.share_memory_()  # moves it, and all that lies in the same storage, the first time

    def send_in_place(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._send(tensors, None)

    def _send(self, payload: Any, load_format: str | None) -> None:
        # Each of the engine's ranks gets a handle of its own: handles are counted.
        payloads = [_serialize(payload) for _ in range(self.tensor_parallel)]
        self.receiver.update_weights(payloads, load_format)

    def close(self) -> None:
        super().close()
        if platform.has_cuda():
            torch.cuda.ipc_collect()  # free the buckets the engine has let go


def _places(bucket: Bucket) -> list[SimpleNamespace]:
    """Where each tensor lies. Source: SGLang's FlattenedTensorMetadata."""
    places, start = [], 0
    for tensor in bucket:
        end = start + tensor.nbytes
        place = {"start_idx": start, "end_idx": end, "numel": tensor.nbytes}
        places.append(SimpleNamespace(name=tensor.name, shape=torch.Size(tensor.shape), dtype=tensor.dtype, **place))
        start = end
    return places


def _serialize(payload: Any) -> str:
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


def _shared_memory(size: int) -> torch.Tensor:
    """uint8 [size], in shared memory from the start: sharing it later would copy it."""
    with _room(size):
        return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_using_filename_cpu(size))


@contextlib.contextmanager
def _room(num_bytes: int) -> Iterator[None]:
    """Say what to do when there is no room for so much in shared memory."""
    try:
        yield
    except RuntimeError as error:
        if "unable to allocate shared memory" not in str(error):
            raise
        raise MemoryError(
            f"no room for {num_bytes / 2**30:.2f} GiB of weights in shared memory, from which an engine on the CPU "
            "takes them: enlarge /dev/shm to the actor's size and two rollout.sync.bucket_bytes (docker run "
            f"--shm-size=...), or set rollout.sync.transport to broadcast ({error})"
        ) from error
