"""Training runs started by their command, for the stages that are whole runs, and the figures that they report."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import CUDA, REPOSITORY
from program import ONE_RANK_EACH

from megappo.config.loading import load_config
from megappo.lab.estimate.gpu_memory import Cluster, MemoryEstimate
from megappo.observe.metrics_file import read_metrics
from megappo.placement.run_plan import plan_run
from megappo.runtime.gpus import GIB, find_gpu

FIGURES = re.compile(
    r"^(timing_s|timing|memory|sync)/|/mfu$|^reward/score/mean$|/log_prob_diff/(mean|max)$|tokens_per_second"
)
MEMORY_SHARE = os.environ.get("STAGE_MEMORY_SHARE")
"""Share of the GPU's memory for each engine, where several stages run at the same time."""
ENGINE_ROWS = ("engine", "KV cache", "CUDA", "NCCL")
"""Rows of the plan that torch's allocator in the trainer does not see."""


def output_folder(name: str) -> Path:
    """Return the folder of a stage's run, which run.py keeps."""
    return Path(os.environ.get("STAGE_OUTPUT", REPOSITORY / "outputs" / "gpu-stages")) / name


def engine_arguments() -> dict[str, str | int]:
    """Return SGLang's arguments for the kernels that remain where FlashInfer is not installed."""
    if not CUDA or importlib.util.find_spec("flashinfer"):
        return {}
    return {"attention_backend": "triton", "sampling_backend": "pytorch", "cuda_graph_max_bs_decode": 64}


def engine_settings() -> list[str]:
    """Return `engine_arguments` as settings of a run."""
    return [f"rollout.server_args.{name}={value}" for name, value in engine_arguments().items()]


def train(config: Path, settings: Iterable[str], num_ranks: int = 1) -> None:
    """Run PPO by launch/local.sh; a failure raises CalledProcessError behind the run's own messages."""
    run_command(train_command(config, settings, num_ranks), num_ranks)


def train_command(config: Path, settings: Iterable[str], num_ranks: int = 1) -> list[str | Path]:
    """Return the command of a run; one rank has everything, and with several the settings place the components."""
    layout = ONE_RANK_EACH if num_ranks == 1 else ()
    share = [f"rollout.mem_fraction_static={MEMORY_SHARE}"] if MEMORY_SHARE else []
    return ["bash", "launch/local.sh", config, *layout, *engine_settings(), *settings, *share]


def run_command(command: Iterable[str | Path], num_ranks: int = 1) -> None:
    """Run a command of this repository; its output goes to stderr, as stdout has the figures alone."""
    subprocess.run([*command], **process_settings(num_ranks), check=True)


def process_settings(num_ranks: int) -> dict[str, Any]:
    """Return the arguments of a command's process."""
    return {"cwd": REPOSITORY, "env": os.environ | {"NPROC": str(num_ranks)}, "stdout": sys.stderr.fileno()}


def figures(run: Path) -> dict[str, float]:
    """Return the timings, memory, speeds and differences of a run's last step."""
    last = read_metrics(run)[-1]
    return {name: value for name, value in last.items() if FIGURES.search(name)}


def planned_gib(config: Path, settings: Iterable[str], device_name: str) -> dict[str, float]:
    """Return phase -> GiB that the plan expects of the trainer's allocator on one GPU of this type."""
    gpu = find_gpu(device_name)
    if gpu is None:
        return {}
    loaded = load_config(config, [*ONE_RANK_EACH, *settings])
    (rank_kind,) = MemoryEstimate(plan_run(loaded, 1), Cluster(gpu.memory)).rank_kinds
    return {
        phase: sum(size for row, size in ledger.items() if not row.startswith(ENGINE_ROWS)) / GIB
        for phase, ledger in rank_kind.ledgers.items()
    }
