"""Retention of checkpoints and the pointer to the latest; a save that fails or is killed is harmless."""

import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from commands import assert_equal
from component_engines import build, train, weights
from ppo_engines import Case
from saved import load_checkpoint, save_checkpoint
from spawn import run_ranks
from torch.multiprocessing import ProcessExitedException

from megappo.batch.exchange import Exchange
from megappo.checkpoint.folders import CheckpointError
from megappo.checkpoint.store import CheckpointStore
from megappo.models.train_engine import TrainedEngine
from megappo.placement.layout import Layout

CASES = {"actor": Case(Layout((0, 1), tensor=2)), "critic": Case(Layout((0, 1), pipeline=2))}


# --- which checkpoint ---


def step_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def check_pruned(rank: int, world_size: int, folders: dict[str, Path], folder: Path) -> None:
    exchange = Exchange(dist.group.WORLD)
    engines = build(folders, {"actor": Case(Layout((0,)))})
    for step in (8, 9, 10, 11):
        save_checkpoint(CheckpointStore(folder, 2, exchange), step, engines, {"step": step})
    assert step_names(folder) == ["step_00000010", "step_00000011"]
    save_checkpoint(CheckpointStore(folder, 0, exchange), 12, engines, {"step": 12})
    assert step_names(folder) == ["step_00000010", "step_00000011", "step_00000012"]
    (folder / "latest").write_text("step_00000010\n")  # as a user would, to go back
    store = CheckpointStore(folder, 1, exchange)
    assert load_checkpoint(store, store.latest(), engines) == {"step": 10}
    save_checkpoint(store, 11, engines, {"step": 11, "again": True})
    assert step_names(folder) == ["step_00000011", "step_00000012"], "what was just saved must not be pruned"
    assert load_checkpoint(store, store.latest(), engines) == {"step": 11, "again": True}
    save_checkpoint(CheckpointStore(folder, 1, exchange, keep_every=12), 13, engines, {})
    assert step_names(folder) == ["step_00000012", "step_00000013"]


def test_the_newest_are_kept_and_latest_is_among_them(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(1, check_pruned, folders, tmp_path / "checkpoints")


# --- a save that does not finish ---


class Dying:
    """An engine whose rank is killed when it comes to be saved."""

    def __init__(self, engine: TrainedEngine):
        self.engine = engine

    def sharded_state_dict(self, is_loading: bool) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("survived SIGKILL")

    def as_world(self) -> AbstractContextManager:
        return self.engine.as_world()


def save_and_die(rank: int, world_size: int, folders: dict[str, Path], folder: Path, dying: int) -> None:
    store = CheckpointStore(folder, 1, Exchange(dist.group.WORLD))
    engines = build(folders, CASES)
    train(engines, 1)
    save_checkpoint(store, 1, engines, {"step": 1})
    train(engines, 1)
    save_checkpoint(store, 2, engines | ({"critic": Dying(engines["critic"])} if rank == dying else {}), {"step": 2})


def go_on(rank: int, world_size: int, folders: dict[str, Path], folder: Path) -> None:
    """The first checkpoint is there and whole; the next save clears the unfinished one away."""
    expected = build(folders, CASES)
    train(expected, 1)
    store = CheckpointStore(folder, 1, Exchange(dist.group.WORLD))
    assert step_names(folder) == ["step_00000001", "step_00000002.partial"]
    engines = build(folders, CASES)
    assert load_checkpoint(store, store.latest(), engines) == {"step": 1}
    assert_equal(weights(engines, folders), weights(expected, folders))
    save_checkpoint(store, 2, engines, {"step": 2})
    assert step_names(folder) == ["step_00000002"]


def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ProcessExitedException, match="rank 1 was ended by SIGKILL"):
        run_ranks(2, save_and_die, folders, tmp_path / "checkpoints", 1)
    run_ranks(2, go_on, folders, tmp_path / "checkpoints")


def fail_and_go_on(rank: int, world_size: int, folders: dict[str, Path], folder: Path) -> None:
    """Once rank 1 can write no file of more than 2000 bytes, once rank 0 cannot write what else belongs there."""
    store = CheckpointStore(folder, 1, Exchange(dist.group.WORLD))
    engines = build(folders, CASES)
    train(engines, 1)
    save_checkpoint(store, 1, engines, {"step": 1})
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match="cannot save actor to .*step_00000002.partial: File too large$"):
        save_checkpoint(store, 2, engines, {"step": 2})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises((TypeError, RuntimeError), match="not JSON serializable"):
        save_checkpoint(
            store, 2, engines, {}, write_more=lambda folder: store.exchange.on_rank_0(lambda: json.dumps(object()))
        )
    go_on(rank, world_size, folders, folder)


def save_while_training(rank: int, world_size: int, folders: dict[str, Path], folder: Path) -> None:
    """An asynchronous save stores the state from when it began; a failed one is reported when it is finished."""
    store = CheckpointStore(folder, 0, Exchange(dist.group.WORLD))
    engines = build(folders, CASES)
    train(engines, 1)
    for step in (1, 2):  # the second in memory of the first's copies
        expected = weights(engines, folders)
        store.begin(step, engines, {"step": step})
        after = train(engines, 1)
        path = store.finish()
        assert path == store.latest() and step_names(folder)[-1] == f"step_{step:08}"
        loaded = build(folders, CASES)
        assert load_checkpoint(store, path, loaded) == {"step": step}
        assert_equal(weights(loaded, folders), expected)
        assert train(loaded, 1) == after
        assert_equal(weights(loaded, folders), weights(engines, folders))
        assert not store.is_written() and store.finish() is None

    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    store.begin(3, engines, {"step": 3})
    train(engines, 1)
    while not store.is_written():
        pass
    with pytest.raises(CheckpointError, match="cannot save actor to .*step_00000003.partial: File too large$"):
        store.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert path == store.latest() and step_names(folder) == ["step_00000001", "step_00000002"]


def test_training_goes_on_while_a_copy_is_written(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(2, save_while_training, folders, tmp_path / "checkpoints")


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_checkpoint_before(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    run_ranks(2, fail_and_go_on, folders, tmp_path / "checkpoints")


# --- the pointer `latest` ---


# Damages of `latest`, and the warning about each.
POINTERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "latest cannot be read .No such file or directory: correct the path or its permissions."),
    "not text": (lambda pointer: pointer.write_bytes(b"\xff\x00step"), "latest cannot be read .it is not UTF-8 text.*"),
    "empty": (lambda pointer: pointer.write_text(""), "latest names no checkpoint that is there: found ''"),
    "garbage": (lambda pointer: pointer.write_text("../../etc\n"), "latest names no checkpoint .*found '../../etc'"),
    "of nothing": (lambda pointer: pointer.write_text("step_00000009\n"), "latest names no .*found 'step_00000009'"),
}


def check_pointers(rank: int, world_size: int, folders: dict[str, Path], whole: Path) -> None:
    exchange = Exchange(dist.group.WORLD)
    engines = build(folders, {"actor": Case(Layout((0,)))})
    for step in (1, 2):
        save_checkpoint(CheckpointStore(whole, 0, exchange), step, engines, {})
    for name, (change, message) in POINTERS.items():
        folder, warnings = whole.with_name(name), []
        shutil.copytree(whole, folder)
        change(folder / "latest")
        store = CheckpointStore(folder, 0, exchange, warnings.append)
        assert store.latest() == folder / "step_00000002"
        [warning] = warnings
        assert re.fullmatch(f"WARNING: .*{message}; resuming from .*step_00000002", warning)
        save_checkpoint(store, 3, engines, {})
        assert (folder / "latest").read_text() == "step_00000003\n"
    shutil.rmtree(whole / "step_00000001")
    shutil.rmtree(whole / "step_00000002")
    with pytest.raises(CheckpointError, match="latest is there, but no checkpoint beside it: restore them, or remove"):
        CheckpointStore(whole, 0, exchange).latest()


def test_without_a_latest_that_names_one_the_newest_is_used(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(1, check_pointers, folders, tmp_path / "whole")
