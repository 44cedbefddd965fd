"""A training checkpoint of tiny engines, and what they held when it was saved."""

from pathlib import Path

import torch
import torch.distributed as dist
from ppo_engines import OPTIM, Case, exported, make_engine, make_loss, make_rows, with_score
from safetensors.torch import load_file, save_file
from spawn import run_ranks
from tiny_models import hf_folder

from megappo.architecture.parsing import read_architecture
from megappo.batch.balance import balanced_partitions
from megappo.batch.exchange import Exchange
from megappo.checkpoint.store import CheckpointStore
from megappo.models.train_engine import TrainedEngine
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout

RANKS = (0, 1)
CASES = {
    "actor": Case(Layout(RANKS, tensor=2), optim=OPTIM),
    "critic": Case(Layout(RANKS, pipeline=2), optim=OPTIM),
    "shared": Case(Layout(RANKS), optim=OPTIM),  # shards the optimizer's state
}


def make_checkpoint(root: Path) -> Path:
    """`root/run/checkpoints/step_00000002` of an actor (TP2), a critic (PP2) and a shared backbone (DP2).

    `root/actor`, ... are the folders they started from, `root/actor.safetensors`, ... their weights when saved.
    """
    folders = {name: with_score(hf_folder(root / name, "qwen2")) for name in ("critic", "shared")}
    folders["actor"] = hf_folder(root / "actor", "qwen2")
    run_ranks(len(RANKS), _train_and_save, root, folders, timeout=200)
    return root / "run" / "checkpoints" / "step_00000002"


def build(folders: dict[str, Path], cases: dict[str, Case]) -> dict[str, TrainedEngine]:
    groups = build_groups({name: case.layout for name, case in cases.items()}, seed=0)
    return {name: make_engine(folders[name], case, groups[name], name) for name, case in cases.items()}


def train(engines: dict[str, TrainedEngine], num_steps: int) -> dict[str, float]:
    """Some optimizer steps; the last one's gradient norms."""
    rows = make_rows(91)
    norms = {}
    for name, engine in engines.items():
        layout = engine.groups.layout
        mine = balanced_partitions([len(tokens) for tokens in rows.input_ids], layout.data)
        for _ in range(num_steps):
            step = engine.train_batch(rows.select(mine[layout.shard_of(dist.get_rank())]), make_loss(name, rows))
            norms[name] = step.grad_norm
    return norms


def weights(engine: TrainedEngine, folder: Path, name: str) -> dict[str, torch.Tensor]:
    return exported(engine, read_architecture(folder), name)


def saved_weights(root: Path, name: str) -> dict[str, torch.Tensor]:
    """Weights of an engine when the checkpoint was saved."""
    return load_file(root / f"{name}.safetensors")


def _train_and_save(rank: int, world_size: int, root: Path, folders: dict[str, Path]) -> None:
    engines = build(folders, CASES)
    train(engines, 2)
    CheckpointStore(root / "run" / "checkpoints", 0, Exchange(dist.group.WORLD)).save(2, engines, {"step": 2})
    for name, engine in engines.items():
        tensors = weights(engine, folders[name], name)
        if rank == 0:
            save_file(tensors, root / f"{name}.safetensors")
