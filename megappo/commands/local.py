"""`megappo train`, `megappo sft` and `megappo reward-model`: check a config, then replace this process by
megappo.torchrun, which starts the ranks of this node."""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence

from megappo.commands import plan
from megappo.commands.arguments import reward_model_arguments, sft_arguments, train_arguments
from megappo.runtime.machine import PYTHON, for_python, num_gpus
from megappo.runtime.status import STATUS

CPU_RANKS = 2


def train(words: Sequence[str]) -> int:
    """Start the ranks; return 2 for a config that cannot work."""
    return _start(train_arguments(words))


def sft(words: Sequence[str]) -> int:
    """Start the ranks of supervised fine-tuning; return 2 for a config that cannot work."""
    return _start(sft_arguments(words), "trainer.kind=sft")


def reward_model(words: Sequence[str]) -> int:
    """Start the ranks that train a reward model; return 2 for a config that cannot work."""
    return _start(reward_model_arguments(words), "trainer.kind=reward_model")


def _start(args: argparse.Namespace, *overrides: str) -> int:
    return start(args.config, [*args.overrides, *overrides], args.nproc)


def start(config: str, overrides: Sequence[str], nproc: int | None) -> int:
    """Check a config and start its ranks on this node in place of this process.

    Args:
        nproc: number of ranks; None = one per GPU.

    Errors in config, data and reward function are reported now, not after every rank has imported the program.
    """
    words = [config, *overrides]
    num_ranks = nproc or num_gpus() or CPU_RANKS
    STATUS.start("config check")
    with contextlib.redirect_stdout(io.StringIO()):
        code = plan.main(["--world-size", str(num_ranks), "--download", *words])
    STATUS.stop()
    if code:
        return code
    variables = for_python(os.environ) | {"PYTHONSAFEPATH": "1"}
    if num_gpus():  # tensor parallelism overlaps communication and computation only in this order of kernels
        variables.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    launcher = ["-m", "megappo.torchrun", "--standalone", "--nproc-per-node", str(num_ranks)]
    sys.stdout.flush()
    os.execve(sys.executable, [*PYTHON, *launcher, "-m", "megappo.train", *words], variables)
