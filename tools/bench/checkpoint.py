"""How long a save holds training up: at once, and in the background (trainer.async_save), in one run.

    python tools/bench/checkpoint.py --megabytes 2000
    python -m megappo.torchrun --nproc-per-node 2 tools/bench/checkpoint.py

Real PPO steps of an actor and a critic on fixed rollouts; prints medians. A save in the background holds training up
while it copies, and when it is completed; besides, it takes processor time from the steps that go on meanwhile.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch.distributed as dist
from same_numbers import build, settings
from timed import seconds, write_llama

from megappo.batch.exchange import Exchange
from megappo.config.schema import Config
from megappo.trainer.loop import Trainer
from megappo.trainer.run import Run

HIDDEN, VOCABULARY = 512, 4096
SAVED_BYTES = 16  # of each parameter: the model's, the main one and two moments, in fp32
COMPONENTS = 2


def measure(run: Run, trainer: Trainer, repeats: int) -> dict[str, float]:
    """Medians in seconds of a step alone, a save at once, and a save in the background with the steps beside it."""
    found: dict[str, list[float]] = {name: [] for name in ("step", "save", "begin", "beside", "finish")}
    number = 0

    def step() -> float:
        nonlocal number
        number += 1
        run.progress.finish(number)
        return seconds(lambda: trainer.step(number))

    step()
    gc.freeze()  # as Trainer.train
    for _ in range(repeats):
        found["step"].append(step())
        found["save"].append(seconds(run.save))
        found["begin"].append(seconds(lambda: run.save(in_background=True)))
        run.lap()
        while run.progress.store.is_saving:
            found["beside"].append(step())
            run.finish_save_if_written()
        found["finish"].append(run.phase.seconds("finish_save"))
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=800, help="size of a checkpoint in MiB (default 800)")
    parser.add_argument("--repeats", type=int, default=5, help="saves of each kind (default 5)")
    args = parser.parse_args()
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo")
    exchange = Exchange(dist.group.WORLD)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(exchange.share(temporary)[0])
        parameters = args.megabytes * 2**20 / SAVED_BYTES / COMPONENTS
        exchange.on_rank_0(lambda: write_llama(folder, parameters, hidden=HIDDEN, vocabulary=VOCABULARY))
        ranks = f"0-{exchange.world_size - 1}"
        given = settings(folder) | {"placement": {"actor": ranks, "critic": ranks, "rollout": ranks}}
        given["trainer"] |= {"keep_checkpoints": 1, "total_steps": 1000}
        run = build(config := Config.model_validate(given))
        found = measure(run, Trainer(config, run), args.repeats)
        size = sum(file.stat().st_size for file in run.progress.checkpoint.rglob("*") if file.is_file())
    if exchange.rank == 0:
        held = found["begin"] + found["finish"]
        print(
            f"{size / 2**20:.0f} MiB  at once {found['save']:.2f} s  in the background {held:.2f} s (begin "
            f"{found['begin']:.2f}, finish {found['finish']:.2f}): {held / found['save']:.0%} of it  "
            f"a step alone {found['step']:.2f} s, beside a save {found['beside']:.2f} s"
        )


if __name__ == "__main__":
    main()
