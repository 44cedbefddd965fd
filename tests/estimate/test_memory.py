"""What hosts and engines take, against plain counts, and GPUs by the names that CUDA gives them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from planning import REPOSITORY
from published_models import published_folders

from megappo.architecture.parameters import stage_sizes
from megappo.architecture.parsing import read_architecture
from megappo.config.loading import load_config
from megappo.config.schema import Parallel
from megappo.estimate.fitting import _has_room
from megappo.estimate.gpus import GIB, GPUS, find_gpu
from megappo.estimate.memory import Cluster, MemoryEstimate
from megappo.estimate.seconds import BUCKET_SECONDS, TimeEstimate

MIXTURE = REPOSITORY / "configs" / "qwen3_30b_a3b_4node.yaml"


@pytest.fixture(autouse=True)
def published(tmp_path: Path) -> Iterator[None]:
    with contextlib.chdir(published_folders(tmp_path)):
        yield


def estimate(*overrides: str, world_size: int = 32) -> MemoryEstimate:
    return MemoryEstimate(load_config(MIXTURE, overrides), Cluster(world_size, 79.1 * GIB))


@pytest.mark.parametrize(
    "layout",
    [
        {"expert": 8},
        {"tensor": 2, "context": 2, "expert": 1},
        {"tensor": 2, "pipeline": 2, "expert": 4, "expert_tensor": 2},
    ],
    ids=str,
)
def test_a_save_copies_everything_once_over_all_nodes(layout: dict[str, int]) -> None:
    """Weights in bf16; main parameters and two moments in fp32."""
    memory = estimate(*(f"actor.parallel.{key}={str(value).lower()}" for key, value in layout.items()))
    [size] = stage_sizes(read_architecture("models/Qwen3-30B-A3B"), Parallel())
    assert memory.host()["a save"] * 4 == pytest.approx((2 + 3 * 4) * sum(size), rel=0.05)


def test_engines_elsewhere_take_none_of_the_gpus():
    elsewhere = estimate("rollout.engines=[http://a:1]", "rollout.max_total_tokens=1")
    assert not any(place.has_engine for place in elsewhere.places)
    assert any(place.has_engine for place in estimate().places)
    roomy = [one for one in (elsewhere, estimate("rollout.max_total_tokens=1")) if _has_room(one)]
    assert roomy == [elsewhere]


def test_an_engine_takes_no_more_than_its_tokens() -> None:
    whole, limited = estimate(), estimate("rollout.max_total_tokens=100000")
    assert limited.engine.cache_tokens == 100_000 < whole.engine.cache_tokens
    # 48 layers, 4 heads of 128 for keys and for values, over 4 GPUs, in bf16
    assert limited.engine.cache == 100_000 * 48 * 2 * 128 * 2 < whole.engine.cache


def test_a_sync_takes_round_trips_and_two_buckets_at_most() -> None:
    [size] = stage_sizes(read_architecture("models/Qwen3-30B-A3B"), Parallel())
    small, large, whole = (estimate(f"rollout.sync.bucket_bytes={one}") for one in (2**29, 2**31, 2**40))
    assert small.num_buckets == -(-2 * sum(size) // 2**29) and whole.num_buckets == 1
    seconds = [TimeEstimate(one, GPUS["h100"]).seconds["sync"] for one in (small, large)]
    assert seconds[0] - seconds[1] == pytest.approx((small.num_buckets - large.num_buckets) * BUCKET_SECONDS)
    taken = [one.ledgers[one.fullest]["sync"]["sync buckets"] for one in (small, large, whole)]
    assert taken == [2**30, 2**32, 2 * sum(size)]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", None),
    ],
)
def test_names_of_devices(device: str, name: str | None) -> None:
    gpu = find_gpu(device)
    assert (gpu.name if gpu else None) == name
