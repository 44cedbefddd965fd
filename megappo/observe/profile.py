"""Traces of torch's profiler for some steps and ranks (trainer.profile)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megappo.config.trainer_section import Trainer
from megappo.runtime.heartbeat import heartbeat

PROFILE_FOLDER = "profile"


@contextmanager
def profiled(trainer: Trainer, step: int, rank: int) -> Iterator[None]:
    """Profile a step, if trainer.profile names it and this rank.

    It writes `profile/step_XXXXXXXX_rank_XXXXX.json.gz`, a trace of operators, kernels and phases, and on a GPU
    `..._memory.pickle`, the allocator's snapshot at the end of the step with the history of its blocks.
    """
    if step not in trainer.profile.steps or rank not in trainer.profile.ranks:
        yield
        return
    path = Path(trainer.output_dir, PROFILE_FOLDER, f"step_{step:08d}_rank_{rank:05d}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named with an underscore up to torch 2.14, and documented: https://docs.pytorch.org/docs/stable/torch_cuda_memory
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history()
    with torch.profiler.profile() as profiler:
        yield
    with heartbeat.waiting():
        profiler.export_chrome_trace(f"{path}.json.gz")
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(f"{path}_memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
