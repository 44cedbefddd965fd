"""Offload a model to the host's memory and load it back: speed, bitwise equality, and the GPU memory that another
process gets meanwhile.

    python tests/gpu/stages/offload.py
"""

import tempfile
from pathlib import Path

import torch
from common import CUDA, GIB, OtherProcess, assert_equal, one_rank, report, timed
from engines import VOCABULARY, model_folder, states_of, trained_engine, weights_of
from ppo_engines import make_loss, make_rows

from megappo.models.offload import Offload
from megappo.runtime import platform

PINNED_BATCHES = 2**24
"""Bytes of micro-batches, at most."""
KINDS = ("weights", "gradients", "optimizer")


def free_bytes(call: None = None) -> int:
    """On the GPU, as this process sees it."""
    return torch.cuda.mem_get_info()[0]


def sleep_and_wake(offload: Offload, kind: str, watcher: OtherProcess | None) -> dict[str, float]:
    """One kind, for the second time, so that its place on the host is there."""
    others = {other: False for other in KINDS if other != kind}
    for _ in range(2):
        platform.empty_cache()
        before, free = torch.cuda.memory_allocated() if CUDA else 0, watcher.ask(None) if watcher else 0
        _, asleep = timed(lambda: offload.rest(others))
        assert offload.asleep == {kind}
        freed = before - torch.cuda.memory_allocated() if CUDA else 0
        platform.empty_cache()
        seen = watcher.ask(None) - free if watcher else 0
        _, awake = timed(lambda: offload.wake({kind: True}))
    figures = {f"{kind}_sleep_seconds": asleep, f"{kind}_wake_seconds": awake}
    if watcher:
        assert freed > 0 and seen > 0.8 * freed, f"{kind}: {freed} bytes are freed, another process sees {seen}"
        speeds = {f"{kind}_{name}_gib_per_second": freed / GIB / x for name, x in (("sleep", asleep), ("wake", awake))}
        figures |= {f"{kind}_gib": freed / GIB, **speeds}
    return figures


def measure() -> dict:
    figures: dict = {} if CUDA else {"skipped": "memory that another process sees needs CUDA"}
    watcher = OtherProcess(free_bytes) if CUDA else None
    with one_rank() as groups, tempfile.TemporaryDirectory() as root:
        folder = model_folder(Path(root))
        engine, rows = trained_engine(folder, groups), make_rows(VOCABULARY)
        loss = make_loss("actor", rows)
        engine.train_batch(rows, loss)
        offload = Offload(engine, KINDS)
        weights, states = weights_of(engine, folder), states_of(engine)
        for kind in KINDS:
            figures |= sleep_and_wake(offload, kind, watcher)
            assert_equal(weights_of(engine, folder), weights)
            assert_equal(states_of(engine), states)
        engine.train_batch(rows, loss)
        after = states_of(engine)
        assert any((after[name] != state).any() for name, state in states.items())
    if watcher:
        watcher.end()
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        assert pinned < 1.05 * offload.host_bytes + PINNED_BATCHES, f"{pinned} bytes for {offload.host_bytes}"
        figures |= {"host_gib": offload.host_bytes / GIB, "pinned_gib": pinned / GIB}
    return {"stage": "offload", **figures}


if __name__ == "__main__":
    report(measure)
