"""A checkpoint of an actor in bf16 with AdamW, saved and loaded: time, and the most memory of GPU and host.

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


def host_gib() -> float:
    """The most that this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def measure() -> dict:
    with one_rank() as groups, tempfile.TemporaryDirectory() as root:
        folder = model_folder(Path(root, "hf"))
        engine, rows = trained_engine(folder, groups), make_rows(VOCABULARY)
        engine.train_batch(rows, make_loss("actor", rows))
        store = CheckpointStore(Path(root, "checkpoints"), 1, Exchange(dist.group.WORLD))
        figures = {"host_before_gib": host_gib()}
        path, saved = measured(partial(save_checkpoint, store, 1, {"actor": engine}, {}), repeats=0)
        figures["host_peak_of_save_gib"] = host_gib()
        weights, states = weights_of(engine, folder), states_of(engine)
        nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        assert nbytes >= num_bytes(weights) + num_bytes(states), "the checkpoint lacks something"
        del engine
        loaded = trained_engine(folder, groups)
        fresh = states_of(loaded)
        assert any((fresh[name] != state).any() for name, state in states.items())
        _, read = measured(lambda: store.load(path, {"actor": loaded}), repeats=0)
        figures["host_peak_of_load_gib"] = host_gib()
        assert_equal(weights_of(loaded, folder), weights)
        assert_equal(states_of(loaded), states)
    for name, figure in (("save", saved), ("load", read)):
        figures |= {f"{name}_{key}": value for key, value in figure.items()}
        figures[f"{name}_gib_per_second"] = nbytes / GIB / figure["seconds"]
    return {"stage": "checkpoint", "checkpoint_gib": nbytes / GIB, **figures}


if __name__ == "__main__":
    report(measure)
