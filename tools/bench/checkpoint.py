"""Measure how long saves block training, synchronous and asynchronous (trainer.async_save) in one run; or a resume.

    .venv/bin/python tools/bench/checkpoint.py --megabytes 2000
    .venv/bin/python -m megappo.torchrun --nproc-per-node 2 tools/bench/checkpoint.py [--resume]

Runs real PPO steps of an actor and a critic on fixed rollouts; prints medians, and the range of each ratio. An
asynchronous save blocks training while it copies and again while it completes; it also takes CPU time from the steps
that run meanwhile. The first one of a run takes longer than later ones, which reuse its memory for their copies, so
both are reported. A synchronous save frees that memory, so that each round has a first asynchronous save.

With --resume the checkpoint is verified against its checksums and loaded into the models that wrote it. Reported are
seconds, the bytes that each rank reads in a load, and the peak memory on top of what the rank keeps.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch.distributed as dist
from peak_memory import MIB, PeakMemory, bytes_read
from same_numbers import build, settings
from timed import seconds, write_llama

from megappo.batch.exchange import Exchange
from megappo.config.schema import Config
from megappo.recipes.ppo import ppo_step
from megappo.trainer.run import Run

HIDDEN, VOCABULARY = 512, 4096
SAVED_BYTES = 16  # of each parameter: the model's, the main one and two moments, in fp32
COMPONENTS = 2
IN_BACKGROUND = ("the first", "a later")


def measure(run: Run, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of a step alone, of a step beside a save, of a synchronous save, and of the beginning and the
    finish of each asynchronous save of `IN_BACKGROUND`.
    """
    found: dict[str, list[float]] = defaultdict(list)
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        return seconds(lambda: ppo_step(run, number))

    step()
    gc.freeze()  # as Run.begin_training
    for _ in range(repeats):
        found["step"].append(step())
        found["at once"].append(seconds(run.save))
        for name in IN_BACKGROUND:
            found["step"].append(step())
            begin = seconds(lambda: run.save(in_background=True))
            run.phase.timers.lap()
            while run.progress.store.is_saving:
                found["beside"].append(step())
                run.finish_save_if_written()
            finish = run.phase.seconds("finish_save")
            found[name].append(begin + finish)
            found[f"{name}: begin"].append(begin)
            found[f"{name}: finish"].append(finish)
    return found


def report_lines(found: dict[str, list[float]]) -> Iterator[str]:
    """Yield the lines of the report: medians, with the range of the ratios."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    yield f"at once {medians['at once']:.2f} s"
    for name in IN_BACKGROUND:
        shares = [held / at_once for held, at_once in zip(found[name], found["at once"], strict=True)]
        yield (
            f"in the background, {name}: {medians[name]:.2f} s (begin {medians[f'{name}: begin']:.2f}, finish "
            f"{medians[f'{name}: finish']:.2f}): {statistics.median(shares):.0%} of it ({min(shares):.0%} to "
            f"{max(shares):.0%})"
        )
    yield f"a step alone {medians['step']:.2f} s, beside a save {medians['beside']:.2f} s"


def resumed(run: Run, repeats: int) -> Iterator[str]:
    """Measure a resume on all ranks and yield the lines of the report."""
    store, exchange = run.progress.store, run.exchange
    run.progress.step = 1
    run.save()
    path = store.latest()
    sums = [seconds(store.latest) for _ in range(repeats)]
    memory, before = PeakMemory(), bytes_read()
    loads = [seconds(lambda: store.load(path, run.models.trained)) for _ in range(repeats)]
    ranks = exchange.all_gather(((bytes_read() - before) / repeats / MIB, memory.take() / MIB))
    yield f"sums {statistics.median(sums):.2f} s, load {statistics.median(loads):.2f} s"
    yield f"read {sum(read for read, _ in ranks):.0f} MiB: of each rank {', '.join(f'{read:.0f}' for read, _ in ranks)}"
    yield f"held besides, at most {max(held for _, held in ranks):.0f} MiB on a rank"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=800, help="size of a checkpoint in MiB (default 800)")
    parser.add_argument("--repeats", type=int, default=5, help="saves of each kind (default 5)")
    parser.add_argument("--resume", action="store_true", help="measure a resume instead")
    args = parser.parse_args()
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    exchange = Exchange(dist.group.WORLD)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(exchange.all_gather(temporary)[0])
        parameters = args.megabytes * 2**20 / SAVED_BYTES / COMPONENTS
        exchange.on_rank_0(lambda: write_llama(folder, parameters, hidden=HIDDEN, vocabulary=VOCABULARY))
        ranks = f"0-{exchange.world_size - 1}"
        given = settings(folder) | {"placement": {"actor": ranks, "critic": ranks, "rollout": ranks}}
        given["trainer"] |= {"keep_checkpoints": 1, "total_steps": 1000}
        run = build(Config.model_validate(given))
        lines = list(resumed(run, args.repeats) if args.resume else report_lines(measure(run, args.repeats)))
        size = sum(file.stat().st_size for file in run.progress.checkpoint.rglob("*") if file.is_file())
    if exchange.rank == 0:
        print(f"{size / 2**20:.0f} MiB", *lines, sep="\n")


if __name__ == "__main__":
    main()
