"""A damaged checkpoint: what is damaged is named, and the one before it used."""

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from component_engines import build
from ppo_engines import Case, with_score
from saved import load_checkpoint, save_checkpoint
from spawn import run_ranks
from tiny_models import hf_folder

from megappo.batch.exchange import Exchange
from megappo.checkpoint import checksums
from megappo.checkpoint.folders import CheckpointError
from megappo.checkpoint.store import CheckpointStore
from megappo.placement.layout import Layout

CASES = {"actor": Case(Layout((0, 1), tensor=2)), "critic": Case(Layout((0, 1), pipeline=2))}


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def a_shard(component: str) -> Callable[[Path], Path]:
    return lambda step: sorted((step / component).glob("*.distcp"))[-1]


# The damage, its name in the warning, and the error when the checkpoint is loaded nevertheless.
DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no state": (lambda step: (step / "state.json").unlink(), "state.json is missing", "state.json is not what a run"),
    "cut state": (lambda step: truncate(step / "state.json"), "state.json is altered or cut off", "state.json is not"),
    "no actor": (lambda step: shutil.rmtree(step / "actor"), "actor/.metadata is missing", "cannot load actor from"),
    "no shard": (lambda step: a_shard("critic")(step).unlink(), "critic/__.*distcp is missing", "critic from.*distcp"),
    "cut shard": (lambda step: truncate(a_shard("critic")(step)), "critic/__.*distcp is altered", "load critic from"),
    "empty shard": (lambda step: os.truncate(a_shard("actor")(step), 0), "actor/__.*distcp is altered", "actor from"),
    "no metadata": (lambda step: (step / "actor" / ".metadata").unlink(), "actor/.metadata is missing", "actor from"),
    "cut metadata": (
        lambda step: truncate(step / "critic" / ".metadata"),
        "critic/.metadata is altered",
        "critic from",
    ),
    "cut common.pt": (lambda step: truncate(step / "actor" / "common.pt"), "actor/common.pt is altered", "actor from"),
    "no sums": (lambda step: (step / "SHA256SUMS").unlink(), "SHA256SUMS is missing.*sha256sum", ""),
    "a file too many": (lambda step: (step / "actor" / "x").touch(), "actor/x is not listed in SHA256SUMS", ""),
}


def check_damages(rank: int, world_size: int, folders: dict[str, Path], whole: Path, other: Path) -> None:
    exchange = Exchange(dist.group.WORLD)
    engines = build(folders, CASES)
    for step in (1, 2):
        save_checkpoint(CheckpointStore(whole, 0, exchange), step, engines, {"step": step})
    for name, (damage, called, refusal) in DAMAGES.items():
        folder = whole.with_name(name)
        if rank == 0:
            shutil.copytree(whole, folder)
            damage(folder / "step_00000002")
        exchange.all_gather(None)
        warnings: list[str] = []
        store = CheckpointStore(folder, 0, exchange, warnings.append)
        assert store.latest() == folder / "step_00000001", name
        if rank == 0:
            [warning] = warnings
            assert re.fullmatch(
                f"WARNING: .*step_00000002 is damaged: .*{called}.*; resuming from .*_00000001", warning
            )
            shutil.rmtree(folder / "step_00000001")
        exchange.all_gather(None)
        with pytest.raises(CheckpointError, match=f"step_00000002 is damaged: .*{called}.*trainer.output_dir"):
            store.latest()
        if refusal:
            with pytest.raises(CheckpointError, match=f"(?s){refusal}") as caught:
                load_checkpoint(store, folder / "step_00000002", engines)
            assert "step_00000002" in str(caught.value)
    store = CheckpointStore(whole, 0, exchange)
    larger = build(folders | {"critic": other}, CASES)
    with pytest.raises(CheckpointError, match="(?s)cannot load critic from.*step_00000002.*shape"):
        store.load(store.latest(), larger)
    assert load_checkpoint(store, store.latest(), engines) == {"step": 2}


def test_of_a_damaged_checkpoint_the_file_is_named_and_the_one_before_it_used(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    other = with_score(hf_folder(tmp_path / "other", "qwen2", intermediate_size=64))
    run_ranks(2, check_damages, folders, tmp_path / "whole", other)


def check_flips(rank: int, world_size: int, folders: dict[str, Path], folder: Path, num_places: int) -> None:
    """One bit of a file at a time, in places over all of each file."""
    exchange, warnings = Exchange(dist.group.WORLD), []
    engines = build(folders, {"actor": Case(Layout((0,))), "critic": Case(Layout((0,)))})
    store = CheckpointStore(folder, 0, exchange, warnings.append)
    for step in (1, 2):
        save_checkpoint(store, step, engines, {"step": step})
    files = [path for path in (folder / "step_00000002").rglob("*") if path.is_file()]
    assert len(files) == 12
    for path in files:
        content = path.read_bytes()
        for place in {*range(0, len(content), max(1, len(content) // num_places)), len(content) - 1}:
            flipped = bytearray(content)
            flipped[place] ^= 1 << place % 8
            path.write_bytes(flipped)
            assert store.latest() == folder / "step_00000001", (path, place)
            named = path.relative_to(folder / "step_00000002").as_posix()
            assert named in warnings.pop(), (path, place)
        path.write_bytes(content)
    assert store.latest() == folder / "step_00000002" and not warnings
    subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder / "step_00000002", check=True
    )


@pytest.mark.parametrize("num_places", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_named_and_the_checkpoint_before_used(
    folders: dict[str, Path], tmp_path: Path, num_places: int
) -> None:
    run_ranks(1, check_flips, folders, tmp_path / "checkpoints", num_places, timeout=300)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_rank_sums_several_files_at_once(tmp_path: Path) -> None:
    """With one thread, SHA-256 is slower than storage."""
    names, together = ["a", "b"], threading.Barrier(2, timeout=20)

    def summed(path: Path) -> str:
        together.wait()  # BrokenBarrierError unless both are here
        return "as it was"

    with patch.object(checksums, "file_sum", summed):
        found = checksums.altered(tmp_path, {"a": "as it was", "b": "other"}, names)
    assert found == ["b is altered or cut off, by its sum in SHA256SUMS"]
