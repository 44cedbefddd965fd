"""Two or more ranks without a run, each on a GPU of its own, for kit/node.py.

python tests/gpu/stages/several_ranks.py {sleeping_engine,overlap,communicators}

sleeping_engine: an engine over two GPUs sleeps and wakes, and keeps neither memory nor time from it.
overlap: data-parallel steps with and without overlap_grad_reduce have the same gradient norm.
communicators: GPU memory that NCCL takes for each group of all ranks.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import CUDA, DEVICE, GIB, measured, report, sized
from engines import VOCABULARY, model_folder, trained_engine
from ppo_engines import make_loss, make_rows
from runs import engine_arguments
from safetensors.torch import load_file
from served import score, serving
from spawn import run_ranks
from weight_sources import push

from megappo.lab.estimate.gpu_memory import COMMUNICATOR_BYTES
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout

RANKS = 2
SLEEPS = sized(50, 3)
GROUPS = 8
LENGTHS = sized([(256, 1792)] * 8, [(3, 5)] * 4)
LEFT_BYTES, BOUND = 0.2 * GIB, 1e-2
TIMEOUT = 280


def in_use() -> int:
    """On the first GPU; 0 on a CPU."""
    free, total = torch.cuda.mem_get_info(0) if CUDA else (0, 0)
    return total - free


def sleeping_engine(root: Path) -> dict[str, float]:
    folder = model_folder(root)
    weights = sorted(load_file(folder / "model.safetensors").items())
    shapes = {name: tuple(tensor.shape) for name, tensor in weights}
    weights = [(name, tensor.to(DEVICE)) for name, tensor in weights]
    held, seconds = [], []
    with serving("several_sleeping_engine", folder, engine_arguments(), gpus=RANKS) as engine:
        client = engine.wait_ready()
        expected = score(client)
        for _ in range(SLEEPS):
            start = time.perf_counter()
            client.sleep()
            held.append(in_use())
            client.wake()
            push(client, weights, shapes, tensor_parallel=RANKS, bucket_bytes=2**28)
            seconds.append(time.perf_counter() - start)
        difference = float((score(client) - expected).abs().mean())
    assert difference < BOUND, f"{SLEEPS} sleeps change the log-probs by {difference}"
    assert held[-1] - held[0] < LEFT_BYTES, f"the engine asleep held {held[0]} bytes, then {held[-1]}"
    return {"first_seconds": seconds[0], "last_seconds": seconds[-1], "asleep_gib": held[-1] / GIB}


def train_with_and_without(rank: int, world_size: int, folder: Path, output: Path) -> None:
    torch.cuda.set_device(DEVICE)
    groups = build_groups({"actor": Layout(tuple(range(world_size)))}, seed=0)["actor"]
    rows = make_rows(VOCABULARY, LENGTHS)
    mine = rows.select(list(range(rank, len(LENGTHS), world_size)))
    figures: dict[str, float] = {}
    for name, without in {"on": (), "off": ("overlap_grad_reduce",)}.items():
        engine = trained_engine(folder, groups, without=without)
        loss = make_loss("actor", rows)
        figures[f"{name}_grad_norm"] = engine.train_batch(mine, loss).grad_norm
        _, figure = measured(partial(engine.train_batch, mine, loss))
        figures |= {f"{name}_{key}": value for key, value in figure.items()}
        del engine
    on, off = figures["on_grad_norm"], figures["off_grad_norm"]
    assert abs(on - off) < BOUND * off, figures
    if rank == 0:
        output.write_text(json.dumps(figures))


def make_communicators(rank: int, world_size: int, folder: Path, output: Path) -> None:
    torch.cuda.set_device(DEVICE)
    dist.all_reduce(torch.ones(2**20, device=DEVICE))
    before = in_use()
    for _ in range(GROUPS):
        dist.all_reduce(torch.ones(2**20, device=DEVICE), group=dist.new_group(range(world_size)))
    if CUDA:
        torch.cuda.synchronize()
    if rank == 0:
        output.write_text(json.dumps({"communicator_gib": (in_use() - before) / GROUPS / GIB}))


def over_ranks(function: Callable[..., None], world_size: int, root: Path) -> dict[str, float]:
    """Return the figures that the first rank writes."""
    output = root / "figures.json"
    run_ranks(world_size, function, model_folder(root / "hf"), output, timeout=TIMEOUT)
    return json.loads(output.read_text())


def communicators(root: Path) -> dict[str, float]:
    found = over_ranks(make_communicators, max(torch.cuda.device_count(), RANKS), root)
    found["planned/communicator_gib"] = planned = COMMUNICATOR_BYTES / GIB
    assert found["communicator_gib"] <= planned or not CUDA, f"NCCL takes more than the plan assumes: {found}"
    return found


def overlap(root: Path) -> dict[str, float]:
    return over_ranks(train_with_and_without, RANKS, root)


TRIALS = {"sleeping_engine": sleeping_engine, "overlap": overlap, "communicators": communicators}


def measure() -> dict:
    with tempfile.TemporaryDirectory() as root:
        return {"stage": f"several_{sys.argv[1]}", **TRIALS[sys.argv[1]](Path(root))}


if __name__ == "__main__":
    report(measure)
