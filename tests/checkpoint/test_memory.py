"""Memory of a save: no rank gathers the state of others, and one component's state exists at a time."""

import gc
import weakref
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from component_engines import build, train
from ppo_engines import Case
from saved import save_checkpoint
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.checkpoint.store import CheckpointStore
from megappo.models.train_engine import TrainedEngine
from megappo.placement.layout import Layout


def check_shared_out(rank: int, world_size: int, folders: dict[str, Path]) -> None:
    engines = build(folders, {"actor": Case(Layout((0, 1)))})
    train(engines, 1)
    with patch.object(torch.Tensor, "cuda", side_effect=AssertionError("state goes to the device")):
        state = engines["actor"].sharded_state_dict(is_loading=False)["optimizer"]["param_state"]
    num_own = sum(box.data.numel() for states in state.values() for box in states["exp_avg"])
    numbers_per_rank: list = [None] * world_size
    dist.all_gather_object(numbers_per_rank, num_own)
    num_parameters = sum(one.numel() for chunk in engines["actor"].chunks for one in chunk.parameters())
    assert sum(numbers_per_rank) == num_parameters
    assert all(number < 0.6 * num_parameters for number in numbers_per_rank), "all ranks write their own"


def test_optimizer_state_is_shared_out_over_the_ranks(folders: dict[str, Path]) -> None:
    run_ranks(2, check_shared_out, folders)


class Watched:
    """Engine whose state may be taken only once the previous engine's state is freed."""

    def __init__(self, engine: TrainedEngine, made: list[weakref.ref]):
        self.engine, self.made = engine, made

    def sharded_state_dict(self, is_loading: bool) -> dict[str, Any]:
        assert all(tensor() is None for tensor in self.made)
        state = self.engine.sharded_state_dict(is_loading)
        self.made += [weakref.ref(states["exp_avg"][0]) for states in state["optimizer"]["param_state"].values()]
        return state

    def as_world(self) -> AbstractContextManager:
        return self.engine.as_world()


def check_freed(rank: int, world_size: int, folders: dict[str, Path], folder: Path) -> None:
    engines = build(folders, {kind: Case(Layout((0,))) for kind in folders})
    made: list[weakref.ref] = []
    gc.disable()  # nothing may wait for it
    try:
        watched = {kind: Watched(engine, made) for kind, engine in engines.items()}
        save_checkpoint(CheckpointStore(folder, 0, Exchange(dist.group.WORLD)), 0, watched, {})
    finally:
        gc.enable()
    assert len(made) > 2


def test_one_components_state_is_gone_before_the_next_is_made(folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(1, check_freed, folders, tmp_path)
