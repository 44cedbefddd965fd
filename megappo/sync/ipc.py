"""Hand weights to an engine on the same GPUs as handles to this rank's memory: CUDA IPC; on a CPU, shared memory.

The payload is what sglang.srt.utils.MultiprocessingSerializer writes for a FlattenedTensorBucket, written here without
SGLang: importing it takes a trainer rank seconds and patches torch. SGLang's SafeUnpickler admits SimpleNamespace.
"""

import base64
import hashlib
import io
import re
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing import reductions

from megappo.engines.client import EngineClient
from megappo.runtime import platform
from megappo.sync.transport import FLATTENED_BUCKET, Link, Sender
from megappo.weights.buckets import Bucket
from megappo.weights.hf_folder import peft_config

DEVICE_ARGUMENT = 6  # position of the device among reductions.rebuild_cuda_tensor's arguments


class HandleSender(Sender):
    """Hands buckets to an engine, from the rank that owns it and, with `Link.peers`, from the engine's other ranks.

    With peers, each of the engine's ranks reads its own GPU, or its own node's memory: to read the owner's, each would
    need a CUDA context there, of half a GB, and access from GPU to GPU.

    Args:
        client: the engine's, on the rank that owns it.
    Attributes:
        replaces_model: the engine gets all of its weights.
    """

    replaces_model = True

    def __init__(self, link: Link, client: EngineClient | None):
        self.client = client
        self.peers = link.peers
        self.config = link.config
        self.num_ranks = link.config.rollout.tensor_parallel
        # On a CPU two buffers take turns, kept from sync to sync: new pages cost more time than the copy into them.
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        if not platform.has_cuda():
            # torch's default passes descriptors, which an unrelated process cannot take.
            torch.multiprocessing.set_sharing_strategy("file_system")

    def open(self) -> None:
        if self.client is not None and self.replaces_model:
            self.client.begin_weight_update()

    def next_buffer(self, size: int) -> torch.Tensor | None:
        if platform.has_cuda():
            return readable_bytes(size)
        self._buffers.reverse()
        if len(self._buffers[0]) < size:
            self._buffers[0] = shared_bytes(size)
        return self._buffers[0][:size]

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        payload = {"flattened_tensor": flat, "metadata": _metadata(bucket)}
        if self.peers is None:  # one handle per rank: CUDA IPC counts each as one reference, which its reader releases
            payloads = [_serialize(payload) for _ in range(self.num_ranks)]
        else:
            payloads = [""] * self.num_ranks if self.client is not None else None
            dist.gather_object(_serialize(payload), payloads, group=self.peers, group_dst=0)
        if self.client is not None:
            self._post(payloads)
        if self.peers is not None:
            dist.barrier(self.peers)  # the engine has read all parts

    def _post(self, payloads: list[str]) -> None:
        """Send the engine a payload for each of its ranks, in order."""
        body = {"serialized_named_tensors": payloads, "load_format": FLATTENED_BUCKET, "flush_cache": False}
        self.client.post("/update_weights_from_tensor", body)

    def close(self) -> None:
        if self.client is not None and self.replaces_model:
            self.client.end_weight_update()
        if platform.has_cuda():
            torch.cuda.ipc_collect()  # free the buckets that the engine has let go


class AdapterHandles(HandleSender):
    """Hands adapters to an engine as handles, as `HandleSender` does weights.

    On a CPU SGLang reads some of them as late as the first request: they stay as they are until the engine has the next
    ones, because the two buffers take turns.

    With `rollout.sync.verify` each of the engine's ranks compares every tensor with its SHA-256 at the owner. An engine
    that finds a difference ends, and its log names the tensors.

    Attributes:
        checksums: checksums of the last tensors, by name.
    """

    replaces_model = False

    checksums: Mapping[str, str] | None = None

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        if self.client is not None and self.config.rollout.sync.verify:
            # As SGLang 0.5.23 computes them (managers/tp_worker.py).
            parts = flat.cpu().split([tensor.nbytes for tensor in bucket])
            named = zip(bucket, parts, strict=True)
            self.checksums = {tensor.name: hashlib.sha256(part.numpy()).hexdigest() for tensor, part in named}
        super().send(bucket, flat)

    def _post(self, payloads: list[str]) -> None:
        body = {
            "config_dict": peft_config(self.config.actor.lora),
            "serialized_named_tensors": payloads,
            "load_format": FLATTENED_BUCKET,
            "expected_checksums": self.checksums,
        }
        self.client.load_adapter("/load_lora_adapter_from_tensors", body)


def shared_bytes(size: int) -> torch.Tensor:
    """Return uint8 [size], in shared memory from the start: sharing it later would copy it.

    Raises:
        MemoryError: /dev/shm is too small.
    """
    try:
        storage = torch.UntypedStorage._new_using_filename_cpu(size)
    except RuntimeError as error:
        if "unable to allocate shared memory" not in str(error):
            raise
        raise MemoryError(
            f"no room for {size / 2**30:.2f} GiB of weights in shared memory, from which an engine on the CPU takes "
            "them: enlarge /dev/shm to two rollout.sync.bucket_bytes (docker run --shm-size=...), or set "
            f"rollout.sync.transport to broadcast ({error})"
        ) from error
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def readable_bytes(size: int) -> torch.Tensor | None:
    """Return uint8 [size] outside of expandable segments, which the user has turned on; None where they are off.

    Torch 2.14 shares such a segment by pidfd_getfd, which Ubuntu (kernel.yama.ptrace_scope 1) and containers forbid:
    https://github.com/pytorch/pytorch/issues/165685. While the option is off, its allocator takes memory of other
    segments only (c10/cuda/CUDACachingAllocator.cpp, get_free_block).
    """
    settings = torch._C._accelerator_getAllocatorSettings()
    without, are_on = re.subn(r"(?<=expandable_segments:)\s*True", "False", settings)
    if not are_on:
        return None
    torch._C._accelerator_setAllocatorSettings(without)
    try:
        return torch.empty(size, dtype=torch.uint8, device=platform.device())
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def _metadata(bucket: Bucket) -> list[SimpleNamespace]:
    """Describe where each tensor lies. Source: SGLang's FlattenedTensorMetadata."""
    metadata = []
    start = 0
    for tensor in bucket:
        end = start + tensor.nbytes
        span = {"start_idx": start, "end_idx": end, "numel": tensor.nbytes}
        metadata.append(
            SimpleNamespace(
                name=tensor.name,
                shape=torch.Size(tensor.shape),
                dtype=tensor.dtype,
                **span,
            )
        )
        start = end
    return metadata


def _serialize(payload: object) -> str:
    """Return base64 of a pickle in which tensors are handles to memory that this process keeps."""
    buffer = io.BytesIO()
    pickler = ForkingPickler(buffer)
    pickler.dispatch_table = {**pickler.dispatch_table, torch.Tensor: _reduce_tensor}
    pickler.dump(payload)
    return base64.b64encode(buffer.getvalue()).decode()


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Reduce a tensor as torch does, but name a GPU by its UUID: the engine numbers its visible GPUs differently."""
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if rebuild is reductions.rebuild_cuda_tensor:
        uuid = str(torch.cuda.get_device_properties(arguments[DEVICE_ARGUMENT]).uuid)
        arguments = (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
    return rebuild, arguments
