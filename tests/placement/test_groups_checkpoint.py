"""Checkpoints of a component, taken and resumed through dist_checkpointing inside `as_world()`."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from spawn import run_ranks
from tiny_models import hf_folder
from tiny_training import Trained, Trainee, check_outputs, reference

from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout


def _sharded_state(component: Trained, is_loading: bool) -> dict:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": component.groups.collection.dp_cp,
    }
    with component.groups.active():
        chunks = enumerate(component.chunks)
        model = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in chunks}
        optimizer = component.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def _save(component: Trained, folder: Path) -> None:
    state = _sharded_state(component, is_loading=False)
    with component.groups.active(), component.groups.as_world():
        dist_checkpointing.save(state, str(folder))


def _load(component: Trained, folder: Path) -> None:
    state = _sharded_state(component, is_loading=True)
    with component.groups.active(), component.groups.as_world():
        loaded = dist_checkpointing.load(state, str(folder))
    with component.groups.active():
        for i, chunk in enumerate(component.chunks):
            chunk.load_state_dict(loaded["model"][f"model{i}"])
        component.optimizer.load_state_dict(loaded["optimizer"])


NUM_STEPS = 3


@dataclass(frozen=True)
class Case:
    """Train `saved_at` steps as `before`, go on as `after`; `expected` are Hugging Face's norms and outputs."""

    folder: Path
    saved_at: int
    before: Trainee
    after: Trainee
    expected: tuple[list[float], torch.Tensor]


def _resume(rank: int, world_size: int, cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        layouts = {"before": case.before.layout, "after": case.after.layout}
        groups = build_groups(layouts, seed=0)
        checkpoint = case.folder / "checkpoint"
        checkpoint.mkdir(exist_ok=True)
        norms, outputs = case.expected
        if groups["before"].member:
            component = Trained(case.before, groups["before"], case.folder)
            assert [component.step() for _ in range(case.saved_at)] == pytest.approx(norms[: case.saved_at], rel=2e-5)
            _save(component, checkpoint)
        dist.barrier()
        if groups["after"].member:
            component = Trained(case.after, groups["after"], case.folder)
            _load(component, checkpoint)
            found = [component.step() for _ in range(NUM_STEPS - case.saved_at)]
            assert found == pytest.approx(norms[case.saved_at :], rel=1e-4), name
            check_outputs(component, outputs)


TP2, PP2 = Layout((0, 1), tensor=2), Layout((1, 2), pipeline=2)
CASES = {
    "before the first step": (0, Trainee(True, TP2, sequence=True), Trainee(True, PP2)),
    "tp2 to pp2": (2, Trainee(True, TP2, sequence=True), Trainee(True, PP2)),
    "distributed, before the first step": (
        0,
        Trainee(True, TP2, distributed=True),
        Trainee(True, PP2, distributed=True),
    ),
    "distributed, tp2 to pp2": (2, Trainee(True, TP2, distributed=True), Trainee(True, PP2, distributed=True)),
    "distributed, dp2 tied to dp3": (
        1,
        Trainee(False, Layout((0, 1)), distributed=True),
        Trainee(False, Layout((0, 1, 2)), distributed=True),
    ),
}


def test_resuming_in_another_layout_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    cases = {}
    for name, (saved_at, before, after) in CASES.items():
        folder = hf_folder(tmp_path / name, "qwen2", tie_word_embeddings="tied" in name)
        cases[name] = Case(folder, saved_at, before, after, reference(folder, before.value_head, NUM_STEPS))
    run_ranks(3, _resume, cases, timeout=300)
