"""Training of a critic with frozen parameters against Hugging Face's model with the same ones frozen."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hf_training import assert_outputs, hf_train, shard_of
from ppo_engines import LENGTHS, Case, exported, make_engine, make_loss, make_rows, with_score
from safetensors.torch import load_file
from saved import save_checkpoint
from slow import slow_ones
from spawn import run_ranks
from tiny_models import hf_folder
from tiny_shapes import EXPERTS

from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.checkpoint.store import CheckpointStore
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout

FOUR = (0, 1, 2, 3)
TP_PP = Layout(FOUR, tensor=2, pipeline=2)
CASES = {
    "attention": Case(TP_PP, max_tokens=14, frozen=("attention",)),
    "embedding and mlp, sp, full recompute": Case(
        TP_PP, max_tokens=14, sequence=True, recompute="full", frozen=("embedding", "mlp")
    ),
    "all, dp2 vpp2": Case(
        Layout(FOUR, pipeline=2, virtual_pipeline=2), max_tokens=14, frozen=("embedding", "attention", "mlp")
    ),
    "attention of a mixture": Case(
        Layout(FOUR, tensor=2, expert=2), max_tokens=14, sequence=True, frozen=("attention",)
    ),
}
NAMED = {"embedding": "embed_tokens", "attention": "self_attn", "mlp": ".mlp."}
"""Group -> a part of its parameters' Hugging Face names."""
MOVED = Layout(FOUR, pipeline=2)


def _trains(rank: int, world_size: int, folder: Path, checkpoint: Path, name: str, expected: dict) -> None:
    case, architecture = CASES[name], read_architecture(folder, "value")
    engine = make_engine(folder, case, build_groups({"critic": case.layout}, seed=0)["critic"], "critic")
    rows = make_rows(architecture.vocab_size)
    mine = shard_of(rows, case.layout)
    assert_outputs(engine, rows, mine, expected["outputs"])
    for norm in expected["grad_norms"]:
        step = engine.train_batch(rows.select(mine), make_loss("critic", rows))
        assert step.grad_norm == pytest.approx(norm, rel=2e-5)
    found, before = exported(engine, architecture, "critic"), load_file(folder / "model.safetensors")
    for key, parameter in expected["parameters"].items():
        torch.testing.assert_close(found[key], parameter, rtol=0, atol=2e-5, msg=f"{key} differs")
        is_frozen = any(NAMED[group] in key for group in case.frozen)
        assert torch.equal(found[key], before[key]) == is_frozen, key
    check_resumes(engine, folder, checkpoint, case, found)


def check_resumes(engine, folder: Path, checkpoint: Path, case: Case, weights: dict) -> None:
    """Check that a checkpoint holds all weights, and that training goes on from it in another layout."""
    store = CheckpointStore(checkpoint, 0, Exchange(dist.group.WORLD))
    save_checkpoint(store, 1, {"critic": engine}, {})
    moved = Case(MOVED, max_tokens=14, frozen=case.frozen)
    resumed = make_engine(folder, moved, build_groups({"critic": MOVED}, seed=0)["critic"], "critic")
    store.load(store.latest(), {"critic": resumed})
    architecture = read_architecture(folder, "value")
    loaded = exported(resumed, architecture, "critic")
    assert all(torch.equal(loaded[key], weights[key]) for key in weights)
    rows = make_rows(architecture.vocab_size)
    norms = []
    for one, layout in ((engine, case.layout), (resumed, MOVED)):
        mine = rows.select(shard_of(rows, layout))
        norms.append([one.train_batch(mine, make_loss("critic", rows)).grad_norm for _ in range(2)])
    assert norms[0] == pytest.approx(norms[1], rel=2e-5)


@pytest.mark.parametrize("name", slow_ones(CASES, ["all, dp2 vpp2", "attention of a mixture"]))
def test_frozen_parameters_stay_to_the_bit_and_the_others_train_as_in_hugging_face(name: str, tmp_path: Path) -> None:
    """Weight decay is on, which would change a parameter without a gradient, too."""
    case = CASES[name]
    model_type, changes = ("qwen3_moe", EXPERTS) if "mixture" in name else ("qwen2", {})
    folder = with_score(hf_folder(tmp_path / "hf", model_type, **changes))
    frozen = [NAMED[group] for group in case.frozen]
    expected = hf_train(folder, "critic", None, num_steps=2, lengths=LENGTHS, frozen=frozen)
    run_ranks(4, _trains, folder, tmp_path / "checkpoints", name, expected)
