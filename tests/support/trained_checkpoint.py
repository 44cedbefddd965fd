"""A training checkpoint of tiny engines, and their weights when it was saved."""

from pathlib import Path

import torch
import torch.distributed as dist
from component_engines import build, train
from ppo_engines import OPTIM, Case, exported, with_score
from safetensors.torch import load_file, save_file
from saved import save_checkpoint
from spawn import run_ranks
from tiny_models import hf_folder

from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.checkpoint.store import CheckpointStore
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


def saved_weights(root: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the weights of an engine when the checkpoint was saved."""
    return load_file(root / f"{name}.safetensors")


def _train_and_save(rank: int, world_size: int, root: Path, folders: dict[str, Path]) -> None:
    engines = build(folders, CASES)
    train(engines, 2)
    save_checkpoint(
        CheckpointStore(root / "run" / "checkpoints", 0, Exchange(dist.group.WORLD)), 2, engines, {"step": 2}
    )
    for name, engine in engines.items():
        tensors = exported(engine, read_architecture(folders[name]), name)
        if rank == 0:
            save_file(tensors, root / f"{name}.safetensors")
