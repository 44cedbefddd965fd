"""A run's end: a save that is cut off, and the time that is left to save. Bugs of others."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from saved import load_checkpoint, save_checkpoint
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.checkpoint.store import CheckpointStore
from megappo.runtime import interruption
from megappo.runtime.interruption import Interruption, deadline

TOUCHES_FILES = ((os, "mkdir"), (os, "rename"), (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "rmdir"))
TOUCHES_FILES += ((io, "open"),)


class Killed(BaseException):
    """No Exception, so that nothing is tidied up, as after SIGKILL."""


def killed_before(patch: pytest.MonkeyPatch, calls: int) -> None:
    """End this process's work with files after so many calls."""
    left = iter(range(calls))

    def dying(function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(left, None) is None:
                raise Killed
            return function(*args, **kwargs)

        return call

    for module, name in TOUCHES_FILES:
        patch.setattr(module, name, dying(getattr(module, name)))


def save_killed(store: CheckpointStore, calls: int) -> bool:
    """Save step 2, keeping one; whether it was killed."""
    with pytest.MonkeyPatch.context() as patch:
        killed_before(patch, calls)
        try:
            save_checkpoint(store, 2, {"actor": None}, {"kl": {"value": 0.5}})
        except Killed:
            return True
    return False


def newest_folder(folder: Path) -> str:
    """Return the folder of the highest step, from which a run would resume if it took that one."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and "old" not in path.name)[-1]


def check_kills(rank: int, world_size: int, root: Path) -> None:
    exchange, was_killed, steps, newest = Exchange(dist.group.WORLD), True, [], []
    while was_killed:
        folder = root / str(len(steps))
        save_checkpoint(CheckpointStore(folder, 1, exchange), 1, {"actor": None}, {"kl": {"value": 0.25}})
        was_killed = save_killed(CheckpointStore(folder, 1, exchange), len(steps))
        store = CheckpointStore(folder, 1, exchange)
        state = load_checkpoint(store, store.latest(), {})
        assert state in ({"step": 1, "kl": {"value": 0.25}}, {"step": 2, "kl": {"value": 0.5}})
        steps.append(state["step"])
        newest.append(newest_folder(folder))
        save_checkpoint(store, 3, {"actor": None}, {"kl": {"value": 1.0}})
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_00000003"]
    assert steps == sorted(steps) and steps[-1] == 2 and len(steps) > 10
    assert newest.count("step_00000002.partial") > 3


def test_a_save_killed_anywhere_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """As another node failed, the trainer was killed in the middle of writing its checkpoint:
    https://github.com/PrimeIntellect-ai/prime-rl/issues/2664
    And a run that takes the newest folder goes on from half a checkpoint:
    https://github.com/PrimeIntellect-ai/prime-rl/pull/1825

    Here a save is cut off before each thing that it does with files. tests/checkpoint/test_store.py kills a rank among
    the tensors, tests/run/test_kills.py whole runs.
    """
    run_ranks(1, check_kills, tmp_path)


HOUR = 3600.0


def test_the_time_limit_does_not_begin_with_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock was started after the set-up, so that a run of four hours had no time left for the save
    that was due half an hour before their end: half an hour of set-up had come first.

    https://github.com/NVIDIA-NeMo/RL/issues/3596
    """
    began = 1.7e9
    set_up = began + HOUR / 2
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(int(began)))
    monkeypatch.setattr(interruption, "_STARTED", set_up)
    run, due = Interruption(), deadline(4 * HOUR, HOUR / 2)
    run.begin_saving(due)
    assert due == began + 3.5 * HOUR
    wrong = set_up + 3.5 * HOUR
    assert wrong == began + 4 * HOUR
    monkeypatch.setattr(interruption.time, "time", lambda: due - 1)
    assert run.reason == ""
    monkeypatch.setattr(interruption.time, "time", lambda: due + 1)
    assert run.reason == "the time limit"
