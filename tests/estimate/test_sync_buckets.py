"""The memory of a weight sync beside the models, against the bytes that an actual sync allocates."""

import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from spawn import run_ranks
from tiny_folders import hf_folder, load
from tiny_shapes import GPT_OSS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from weight_sources import SECTIONS

from megappo.architecture.parsing import read_architecture
from megappo.config.schema import Config
from megappo.lab.estimate.gpu_memory import SYNC, Cluster, MemoryEstimate
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.placement.run_plan import plan_run
from megappo.runtime.gpus import GIB
from megappo.sync.sync import WeightSync
from megappo.sync.transport import Sender
from megappo.weights.export import Export
from megappo.weights.load import folder_shapes

STACKED = GPT_OSS | {"num_local_experts": 8, "intermediate_size": 96, "hidden_size": 64, "num_hidden_layers": 3}
LARGEST_BYTES = 8 * 64 * 2 * 96 * 4
"""Gates and ups of a layer's experts, in fp32."""


class Counting(TorchDispatchMode):
    """Counts the bytes of the storages that operators return, while these live."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.most, self.seen = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in given | self.seen:
                self.add(one.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.seen.add(key)
        self.live += size
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self.remove, key, size)

    def remove(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live -= size


class Slow(Sender):
    """Reads a bucket as long as the next one is gathered."""

    def send(self, bucket: Any, flat: torch.Tensor) -> None:
        time.sleep(0.1)


class Lingering(ThreadPoolExecutor):
    """Its threads stay in a call for a while after its result is known, as on a busy machine."""

    def submit(self, *call: Any, **kwargs: Any) -> Future:
        future = super().submit(*call, **kwargs)
        future.add_done_callback(lambda _: time.sleep(0.1))
        return future


def check_counted(rank: int, world_size: int, folder: Path, bucket_bytes: int) -> None:
    architecture = read_architecture(folder)
    groups = build_groups({"actor": Layout((0,))}, seed=0)["actor"]
    export = Export(load(folder, groups), architecture, groups)
    sync = WeightSync(
        export.tensors,
        export,
        [Slow()],
        [],
        folder_shapes(folder, architecture),
        bucket_bytes=bucket_bytes,
        barrier=lambda: None,
        engines_keep=False,
    )
    with pytest.MonkeyPatch.context() as patch, Counting() as counting:
        patch.setattr("megappo.sync.sync.ThreadPoolExecutor", Lingering)
        sync()
    own = {
        "rollout": {"sync": {"bucket_bytes": bucket_bytes}},
        "placement": dict.fromkeys(("actor", "critic", "rollout"), "0"),
    }
    config = Config.model_validate(SECTIONS | own | {"model": {"path": str(folder), "dtype": "fp32"}})
    planned = MemoryEstimate(plan_run(config, 1), Cluster(80 * GIB)).fullest.ledgers[SYNC]["sync buckets"]
    assert 0.6 * planned < counting.most < 1.1 * planned, (counting.most, planned)


@pytest.mark.parametrize("bucket_bytes", [LARGEST_BYTES // 8, LARGEST_BYTES])
def test_two_stacks_of_experts_are_in_flight_and_no_copy_of_one(tmp_path: Path, bucket_bytes: int) -> None:
    folder = hf_folder(tmp_path / "hf", "gpt_oss", **STACKED)
    run_ranks(1, check_counted, folder, bucket_bytes)
