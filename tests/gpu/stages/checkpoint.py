"""A checkpoint of an actor in bf16 with AdamW, and one of adapters, saved and loaded: time, and the most memory of GPU
and host.

python tests/gpu/stages/checkpoint.py
"""

import resource
import tempfile
from functools import partial
from pathlib import Path

import torch.distributed as dist
from common import GIB, assert_equal, measured, num_bytes, one_rank, report
from engines import VOCABULARY, model_folder, states_of, trained_engine, weights_of
from ppo_engines import make_loss, make_rows
from saved import save_checkpoint

from megappo.batch.exchange import Exchange
from megappo.checkpoint.store import CheckpointStore
from megappo.config.model_sections import Lora
from megappo.placement.groups import ComponentGroups


def host_gib() -> float:
    """The most that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def save_and_load(root: Path, groups: ComponentGroups, lora: Lora | None) -> dict[str, float]:
    """Return the figures of a checkpoint; another engine that loads it has the same bits."""
    folder = model_folder(root / "hf")
    engine, rows = trained_engine(folder, groups, lora=lora), make_rows(VOCABULARY)
    engine.train_batch(rows, make_loss("actor", rows))
    store = CheckpointStore(root / "checkpoints", 1, Exchange(dist.group.WORLD))
    figures = {"host_before_gib": host_gib()}
    path, saved = measured(partial(save_checkpoint, store, 1, {"actor": engine}, {}), repeats=0)
    figures["host_peak_of_save_gib"] = host_gib()
    weights, states = weights_of(engine, folder, lora), states_of(engine)
    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    kept = num_bytes(states) + (num_bytes(weights) if lora is None else 0)
    assert nbytes >= kept, "the checkpoint lacks something"
    del engine
    loaded = trained_engine(folder, groups, lora=lora)
    fresh = states_of(loaded)
    assert any((fresh[name] != state).any() for name, state in states.items())
    _, read = measured(lambda: store.load(path, {"actor": loaded}), repeats=0)
    figures["host_peak_of_load_gib"] = host_gib()
    assert_equal(weights_of(loaded, folder, lora), weights)
    assert_equal(states_of(loaded), states)
    for name, figure in (("save", saved), ("load", read)):
        figures |= {f"{name}_{key}": value for key, value in figure.items()}
        figures[f"{name}_gib_per_second"] = nbytes / GIB / figure["seconds"]
    return {"checkpoint_gib": nbytes / GIB, **figures}


def measure() -> dict:
    figures: dict = {"stage": "checkpoint"}
    with one_rank() as groups, tempfile.TemporaryDirectory() as root:
        for name, lora in {"": None, "adapters_": Lora(rank=16)}.items():
            found = save_and_load(Path(root, f"{name}model"), groups, lora)
            figures |= {f"{name}{key}": value for key, value in found.items()}
    return figures


if __name__ == "__main__":
    report(measure)
