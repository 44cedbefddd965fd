"""Train engines of several components: build them, train them on the same rows, and read their weights."""

from pathlib import Path

import torch
import torch.distributed as dist
from ppo_engines import Case, exported, make_engine, make_loss, make_rows

from megappo.architecture.parsing import read_architecture
from megappo.batch.balance import balanced_partitions
from megappo.models.train_engine import TrainedEngine
from megappo.placement.groups import build_groups


def build(folders: dict[str, Path], cases: dict[str, Case]) -> dict[str, TrainedEngine | None]:
    """Build new engines of these components, None where this rank is outside."""
    groups = build_groups({kind: case.layout for kind, case in cases.items()}, seed=0)
    return {
        kind: make_engine(folders[kind], case, groups[kind], kind) if groups[kind].member else None
        for kind, case in cases.items()
    }


def train(engines: dict[str, TrainedEngine | None], num_steps: int) -> dict[str, float]:
    """Train some optimizer steps; return the last one's gradient norms and learning rates, of this rank's engines."""
    metrics: dict[str, float] = {}
    for kind, engine in engines.items():
        if engine is None:
            continue
        rows = make_rows(91)
        layout = engine.groups.layout
        mine = balanced_partitions([len(tokens) for tokens in rows.sequences], layout.data)
        loss = make_loss(kind, rows)
        for _ in range(num_steps):
            step = engine.train_batch(rows.select(mine[layout.shard_of(dist.get_rank())]), loss)
            metrics |= {f"{kind}/{name}": getattr(step, name) for name in ("grad_norm", "lr")}
    return metrics


def weights(engines: dict[str, TrainedEngine | None], folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    """Return all weights of this rank's engines, by component and Hugging Face name."""
    return {
        f"{kind}/{name}": tensor
        for kind, engine in engines.items()
        if engine is not None
        for name, tensor in exported(engine, read_architecture(folders[kind]), kind).items()
    }
