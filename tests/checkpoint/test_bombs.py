"""No code in a checkpoint is run, whichever of its files holds it, when a run goes on from it or a tool reads it."""

import pickle
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from bombs import bombs, is_armed
from ppo_engines import Case, make_engine
from saved import load_checkpoint, save_checkpoint
from spawn import run_ranks
from tiny_models import hf_folder

from megappo.batch.exchange import Exchange
from megappo.checkpoint.folders import CheckpointError
from megappo.checkpoint.store import CheckpointStore
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout

EMBEDDING = "embedding.word_embeddings.weight"
OBJECT = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_4"
PIECES = (EMBEDDING, f"optimizer.state.exp_avg.{EMBEDDING}", OBJECT)


def planted(step: Path, content: bytes) -> Iterator[str]:
    """Puts a bomb into every file of a checkpoint, one after the other, and into every kind of piece of a file."""
    for path in sorted(path for path in step.rglob("*") if path.is_file() and path.name != "SHA256SUMS"):
        before = path.read_bytes()
        path.write_bytes(content)
        yield path.name
        path.write_bytes(before)
    metadata = step / "actor" / ".metadata"
    before = metadata.read_bytes()
    for piece in PIECES:
        found = pickle.loads(before)
        [place] = [place for index, place in found.storage_data.items() if index.fqn == piece]
        shard = step / "actor" / place.relative_path
        whole = shard.read_bytes()
        place.offset, place.length = len(whole), len(content)
        shard.write_bytes(whole + content)
        metadata.write_bytes(pickle.dumps(found))
        yield piece
        shard.write_bytes(whole)
    metadata.write_bytes(before)


def renew_sums(step: Path) -> None:
    subprocess.run("rm SHA256SUMS; find * -type f -exec sha256sum {} + > SHA256SUMS", cwd=step, shell=True, check=True)


def check_bombs(rank: int, world_size: int, model: Path, root: Path) -> None:
    groups = build_groups({"actor": Layout((0,))}, seed=0)
    engines = {"actor": make_engine(model, Case(Layout((0,))), groups["actor"], "actor")}
    whole = save_checkpoint(CheckpointStore(root / "whole", 0, Exchange(dist.group.WORLD)), 1, engines, {})
    marker, refused = root / "went off", set()
    for kind, content in bombs(marker).items():
        assert is_armed(content, marker), kind
        shutil.copytree(whole.parent, root / kind)
        step = root / kind / whole.name
        store = CheckpointStore(step.parent, 0, Exchange(dist.group.WORLD))
        for name in planted(step, content):
            with pytest.raises(CheckpointError, match="is damaged: "):
                store.latest()
            renew_sums(step)  # as an attacker would
            with pytest.raises(CheckpointError) as caught:
                assert store.latest() == step
                load_checkpoint(store, step, engines)
            assert "\n" not in str(caught.value), caught.value
            assert not marker.exists(), (kind, name)
            refused.add(name)
    assert {".metadata", "common.pt", "metadata.json", "state.json", "__0_0.distcp", EMBEDDING} < refused
    assert len(refused) == 9


def test_a_run_goes_on_from_no_bomb(tmp_path: Path) -> None:
    run_ranks(1, check_bombs, hf_folder(tmp_path / "actor", "qwen2"), tmp_path)
