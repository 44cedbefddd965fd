"""`megappo train`, `megappo sft` and `megappo reward-model`: check a config, then replace this process by
megappo.torchrun, which starts the ranks of this node."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from functools import partial

from megappo.commands import plan
from megappo.commands.arguments import start_arguments
from megappo.runtime.machine import PYTHON, for_python, num_gpus
from megappo.runtime.status import STATUS

CPU_RANKS = 2
KIND = {"train": (), "sft": ("trainer.kind=sft",), "reward-model": ("trainer.kind=reward_model",)}
"""Command -> its own override."""


def _start_command(name: str, words: Sequence[str]) -> int:
    """Start the ranks of a command of STARTS; return 2 for a config that cannot work."""
    args = start_arguments(name, words)
    return start(args.config, [*args.overrides, *KIND[name]], args.nproc)


train = partial(_start_command, "train")
sft = partial(_start_command, "sft")
reward_model = partial(_start_command, "reward-model")


def start(config: str, overrides: Sequence[str], nproc: int | None) -> int:
    """Check a config and start its ranks on this node in place of this process.

    Args:
        nproc: number of ranks; None = one per GPU.

    Errors in config, data and reward function are reported now, not after every rank has imported the program.
    """
    words = [config, *overrides]
    num_ranks = nproc or num_gpus() or CPU_RANKS
    STATUS.start("config check")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            code = plan.main(["--world-size", str(num_ranks), "--download", *words])
    finally:
        STATUS.stop()
    if code:
        return code
    variables = for_python(os.environ) | {"PYTHONSAFEPATH": "1"}
    if num_gpus():  # tensor parallelism overlaps communication and computation only in this order of kernels
        variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    launcher = ["-m", "megappo.torchrun", "--standalone", "--nproc-per-node", str(num_ranks)]
    sys.stdout.flush()
    os.execve(sys.executable, [*PYTHON, *launcher, "-m", "megappo.train", *words], variables)
