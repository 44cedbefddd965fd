"""Weights for another process as handles to this one's memory, sent by a thread and read as SGLang does, by its list of
what a pickle may name: equal to the bit, speed, and whether all memory comes back.

    python tests/gpu/stages/ipc.py
"""

import base64
import io
import multiprocessing
import os
import pickle
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import torch
from common import CUDA, DEVICE, GIB, OtherProcess, report, sized
from torch.multiprocessing import reductions
from weight_sources import handle_sender

from megappo.runtime import platform
from megappo.weights.buckets import TensorSpec

ROUNDS, NUM_BYTES = sized((50, 512 * 2**20), (3, 2**16))
LEFT_BYTES = 128 * 2**20
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ALLOWED = {
    ("types", "SimpleNamespace"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch", "bfloat16"),
    ("torch", "device"),
    ("torch", "uint8"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
}
"""The part of SGLang's ALLOWED_GLOBALS that is needed; SGLang admits the last one where it has shared memory."""


class Unpickler(pickle.Unpickler):
    """As SGLang's SafeUnpickler, and finds a GPU by its UUID."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"SGLang refuses {module}.{name}")
        return _rebuild if name == "rebuild_cuda_tensor" else super().find_class(module, name)


def _rebuild(*arguments: Any) -> torch.Tensor:
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    device = uuids.index(arguments[6])
    return reductions.rebuild_cuda_tensor(*arguments[:6], device, *arguments[7:])


def made(seed: int, device: torch.device) -> torch.Tensor:
    """The same bytes in both processes."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(256, (NUM_BYTES,), generator=generator, device=device, dtype=torch.uint8)


def read(call: tuple[int, str | None]) -> float:
    """In the other process: the seconds to open and copy a payload, which is equal to the bytes of its seed. Without a
    payload all memory that is not in use is given back."""
    seed, payload = call
    if payload is None:
        torch.zeros(1, device=DEVICE)
        platform.empty_cache()
        return 0.0
    start = time.perf_counter()
    parts = Unpickler(io.BytesIO(base64.b64decode(payload))).load()
    flat = parts["flattened_tensor"]
    copy = flat.clone()
    torch.cuda.synchronize(flat.device)
    seconds = time.perf_counter() - start
    assert parts["metadata"][0].end_idx == NUM_BYTES
    assert torch.equal(copy, made(seed, flat.device)), "other bytes have arrived"
    return seconds


class Client:
    """In place of an engine's: hands payloads to the other process."""

    def __init__(self) -> None:
        self.reader = OtherProcess(read)
        self.seed, self.seconds = 0, 0.0

    def begin_weight_update(self) -> None: ...

    def end_weight_update(self) -> None: ...

    def post(self, path: str, body: dict[str, Any]) -> None:
        (payload,) = body["serialized_named_tensors"]
        self.seconds += self.reader.ask((self.seed, payload))


def exchange(rounds: int) -> dict[str, float]:
    """Buckets in two places by turns, as a sync has them."""
    client = Client()
    client.reader.ask((0, None))  # it has its CUDA context then
    made(0, DEVICE)
    platform.empty_cache()
    free = torch.cuda.mem_get_info()[0] if CUDA else 0
    sender = handle_sender(client)
    spec = TensorSpec("weight", (NUM_BYTES // 2,), torch.bfloat16)
    places = [torch.empty(NUM_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2)] if CUDA else []
    start = time.perf_counter()
    with ThreadPoolExecutor(1) as thread:
        sender.open()
        for client.seed in range(rounds):
            flat = places[client.seed % 2] if CUDA else sender.next_buffer(NUM_BYTES)
            flat.copy_(made(client.seed, DEVICE))
            thread.submit(sender.send, [spec], flat).result()
    seconds = time.perf_counter() - start
    del flat, places
    client.reader.ask((0, None))
    sender.close()
    platform.empty_cache()
    figures = {"seconds": seconds, "read_and_copy_gib_per_second": rounds * NUM_BYTES / GIB / client.seconds}
    if CUDA:
        figures["left_gib"] = (free - torch.cuda.mem_get_info()[0]) / GIB
        assert figures["left_gib"] * GIB < LEFT_BYTES, figures
    client.reader.end()
    return figures


def measure() -> dict:
    figures: dict = {"stage": "ipc", "rounds": ROUNDS, "bucket_gib": NUM_BYTES / GIB, "skipped": []}
    if torch.cuda.device_count() > 1:  # the other process numbers them from the last on
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
            reversed(platform.gpu_ids(list(range(torch.cuda.device_count()))))
        )
    else:
        figures["skipped"].append("another order of devices needs two GPUs")
    figures |= exchange(ROUNDS)
    if not CUDA:
        figures["skipped"].append("CUDA IPC needs CUDA; these were handles to shared memory")
        return figures
    os.environ.update(EXPANDABLE)  # of processes that begin from now on
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            pool.submit(exchange, 3).result()
            figures["expandable_segments"] = "equal"
        except Exception as error:  # a finding, no fault: nothing relies on them
            figures["expandable_segments"] = f"{type(error).__name__}: {error}"
    return figures


if __name__ == "__main__":
    report(measure)
