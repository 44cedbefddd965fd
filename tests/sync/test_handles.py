"""Handles to GPU memory, as CUDA would give them, read by SGLang's own code."""

import base64
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ppo_engines import Case, make_engine
from safetensors.torch import load_file
from spawn import run_ranks
from torch.multiprocessing import reductions

from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.config.schema import Config
from megappo.placement.groups import build_groups
from megappo.placement.run_plan import plan_run
from megappo.sync import ipc
from megappo.sync.build import build_sync
from megappo.sync.transport import Link
from megappo.weights.buckets import TensorSpec, num_bytes

SECTIONS = {"model": {"path": "m", "dtype": "bf16"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}
BUCKET = [TensorSpec("a", (2, 3), torch.bfloat16), TensorSpec("b", (5,), torch.bfloat16)]
FLAT = torch.arange(11, dtype=torch.bfloat16).view(torch.uint8)

READ = """
import json, sys
from types import SimpleNamespace
import megappo.engines.server  # makes SGLang importable on a CPU
import torch
from torch.multiprocessing import reductions
from sglang.srt.utils import patch_torch
from sglang.srt.utils.common import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

def rebuild(cls, size, stride, offset, storage, dtype, device, handle, *rest):
    devices.append(device)
    return torch.frombuffer(bytearray(handle), dtype=dtype).as_strided(size, stride, offset)

devices, found = [], []
patch_torch.monkey_patch_torch_reductions()
reductions._rebuild_cuda_tensor_original = rebuild
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"GPU-{7 - device}")
for payload in json.load(sys.stdin):
    parts = MultiprocessingSerializer.deserialize(payload)
    bucket = FlattenedTensorBucket(flattened_tensor=parts["flattened_tensor"], metadata=parts["metadata"])
    tensors = {name: [str(t.dtype), t.tolist()] for name, t in bucket.reconstruct_tensors()}
    found.append([devices.pop(), tensors])
print(json.dumps(found))
"""


class Recorder:
    """Records requests."""

    def __init__(self):
        self.posted = []

    def begin_weight_update(self):
        self.posted.append("begin")

    def end_weight_update(self):
        self.posted.append("end")

    def post(self, path, body):
        self.posted.append(body)


def pretend(monkeypatch, device: int) -> None:
    """This process has its tensors on a GPU of this number; GPU i is called GPU-i."""

    def reduce_tensor(tensor):
        sizes = type(tensor), tensor.size(), tensor.stride(), 0, type(tensor._typed_storage()), tensor.dtype
        shared = bytes(tensor.tolist()), tensor.nbytes, 0, False, b"counter", 0, b"event", True
        return reductions.rebuild_cuda_tensor, (*sizes, device, *shared)

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device}"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr("megappo.runtime.platform.has_cuda", lambda: True)


def hand_over(link: Link, client: Recorder | None) -> None:
    sender = ipc.HandleSender(link, client)
    sender.open()
    sender.send(BUCKET, FLAT)
    sender.close()


def test_sglang_reads_a_handle_on_the_gpu_it_names(monkeypatch):
    payloads = []
    for device in (6, 7):  # which the engine numbers 1 and 0
        client = Recorder()
        with monkeypatch.context() as patch:
            pretend(patch, device)
            hand_over(Link(Config.model_validate(SECTIONS), None, num_bytes(BUCKET), 1), client)
        begin, body, end = client.posted
        assert (begin, end, body["load_format"]) == ("begin", "end", "flattened_bucket")
        payloads += body["serialized_named_tensors"]
    command = [sys.executable, "-c", READ]
    done = subprocess.run(command, input=json.dumps(payloads), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    tensors = {"a": ["torch.bfloat16", [[0, 1, 2], [3, 4, 5]]], "b": ["torch.bfloat16", [6, 7, 8, 9, 10]]}
    assert json.loads(done.stdout.splitlines()[-1]) == [[1, tensors], [0, tensors]]


def hand_over_from_each(rank: int, world_size: int, checkpoint: Path) -> None:
    """Two tensor-parallel ranks have the actor, on whose GPUs an engine is cut the same way; one of them shares the
    critic with a third, and so is in more groups than the other."""
    parts = {"model": {"path": str(checkpoint), "dtype": "fp32"}, "actor": {"parallel": {"tensor": 2}}}
    parts |= {"placement": {"actor": "1-2", "critic": "0-1", "rollout": "1-2"}, "rollout": {"tensor_parallel": 2}}
    config = Config.model_validate(SECTIONS | parts)
    plan = plan_run(config, world_size)
    layouts = plan.layouts
    groups = build_groups({name: layouts[name] for name in ("actor", "critic")}, seed=0)["actor"]
    actor = make_engine(checkpoint, Case(layouts["actor"]), groups, "actor") if groups.member else None
    client, exchange = (Recorder() if rank == 1 else None), Exchange(dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, rank)
        route = plan.route
        build_sync(config, route, read_architecture(checkpoint), actor, client, exchange)()
    if client is None:
        return
    weights = load_file(checkpoint / "model.safetensors")
    begin, *bodies, end = client.posted
    assert (begin, end) == ("begin", "end")
    for place, number in enumerate((1, 2)):
        payloads = [base64.b64decode(body["serialized_named_tensors"][place]) for body in bodies]
        received = {}
        for flat, metadata, device in map(read, payloads):
            assert device == f"GPU-{number}"
            for one in metadata:
                received[one.name] = flat[one.start_idx : one.end_idx].view(one.dtype).view(one.shape)
        assert received.keys() == weights.keys()
        assert all(torch.equal(received[name], weights[name]) for name in weights)


def read(payload: bytes) -> tuple[torch.Tensor, list, str]:
    """The bytes of a bucket, what lies where, and the GPU that is named."""
    devices = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reductions,
            "rebuild_cuda_tensor",
            lambda *found: devices.append(found[6]) or torch.frombuffer(bytearray(found[7]), dtype=torch.uint8),
        )
        parts = pickle.loads(payload)
    return parts["flattened_tensor"], parts["metadata"], devices[0]


def test_each_rank_of_an_engine_is_handed_all_weights_on_its_own_gpu(checkpoint):
    run_ranks(3, hand_over_from_each, checkpoint)


ALLOCATE = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from megappo.sync.ipc import readable_bytes

class Settings(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        print(func, torch._C._accelerator_getAllocatorSettings())
        return func(*args, **(kwargs or {}))

with Settings():
    memory = readable_bytes(64)
print(None if memory is None else memory.numel(), torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("settings", "printed"),
    [
        (
            "max_split_size_mb:64,expandable_segments: True",
            ["aten.empty.memory_format max_split_size_mb:64,expandable_segments:False", "64 {}"],
        ),
        ("expandable_segments:False", ["None {}"]),
        ("max_split_size_mb:64", ["None {}"]),
    ],
)
def test_buckets_lie_outside_expandable_segments_which_few_processes_may_share(name, settings, printed):
    """Sharing those fails with "pidfd_getfd: Operation not permitted". The user's other settings stay."""
    environment = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key} | {name: settings}
    done = subprocess.run([sys.executable, "-c", ALLOCATE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [line.format(settings) for line in printed]
