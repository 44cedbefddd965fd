"""Count how often a training step has the GPU wait for the host, and where; never in the policy's head.

A profiler's trace goes to trace.json in the folder of the environment variable OUT.

    OUT=. python tests/gpu/stages/syncs.py
"""

import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from common import CUDA, DEVICE, one_rank, report, sized
from engines import HIDDEN, VOCABULARY, model_folder, trained_engine
from ppo_engines import make_loss, make_rows
from torch.profiler import ProfilerActivity, profile

from megappo.batch.packing import pack
from megappo.models.heads import policy_head

DEPTHS = sized((4, 8), (1, 2))
LENGTHS = sized([(256, 768), (128, 1000)] * 4, [(3, 5), (2, 4)])


@contextmanager
def sync_debug_mode(mode: str):
    """See torch.cuda.set_sync_debug_mode."""
    if not CUDA:
        yield
        return
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits(compute: Callable[[], object]) -> Counter[str]:
    """ "file:line" -> how often the GPU was waited for there; by the warnings that CUDA's torch then gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sync_debug_mode("warn"):
            compute()
    return Counter(f"{one.filename}:{one.lineno}" for one in caught if "synchronizing CUDA" in str(one.message))


def check_head() -> None:
    """Values and gradients, without any wait at all."""
    packed = pack(make_rows(VOCABULARY, LENGTHS), 1, DEVICE)
    weight = torch.randn(VOCABULARY, HIDDEN, device=DEVICE, requires_grad=True)
    head = policy_head(lambda: weight, dist.group.WORLD, VOCABULARY, 0.7)
    output = torch.randn(1, packed.input_ids.shape[1], HIDDEN, device=DEVICE, requires_grad=True)

    def compute() -> None:
        sum(one.sum() for one in head(output, packed).values()).backward()

    compute()  # what is set up once may wait
    with sync_debug_mode("error"):
        compute()


def trace(compute: Callable[[], object], folder: Path) -> dict:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if CUDA else [])]
    with profile(activities=activities) as profiler:
        compute()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    slowest = sorted(profiler.key_averages(), key=lambda one: -(one.self_device_time_total or one.self_cpu_time_total))
    assert slowest, "the profiler saw nothing"
    return {"slowest_operations": [one.key for one in slowest[:10]]}


def measure() -> dict:
    found: dict = {"stage": "syncs"}
    with one_rank() as groups, tempfile.TemporaryDirectory() as root:
        check_head()
        rows = make_rows(VOCABULARY, LENGTHS)
        totals = []
        for depth in DEPTHS:
            engine = trained_engine(model_folder(Path(root, str(depth)), num_hidden_layers=depth), groups)
            loss = make_loss("actor", rows)
            engine.train_batch(rows, loss)
            places = waits(lambda: engine.train_batch(rows, loss))  # noqa: B023
            totals.append(places.total())
        found |= trace(lambda: engine.train_batch(rows, loss), Path(os.environ.get("OUT", root)))
    if not CUDA:
        return found | {"skipped": "set_sync_debug_mode needs CUDA"}
    per_layer = (totals[1] - totals[0]) / (DEPTHS[1] - DEPTHS[0])
    return found | {"waits_per_step": totals, "waits_per_layer": per_layer, "places": dict(places.most_common(20))}


if __name__ == "__main__":
    report(measure)
