"""Checkpoints of training runs: converted to Hugging Face, and resharded with the optimizer's state."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import CONVERT, assert_equal, contents, convert, run, tensors_of
from component_engines import build, train, weights
from saved import load_checkpoint
from spawn import run_ranks
from tiny_folders import read_config
from trained_checkpoint import CASES, make_checkpoint, saved_weights
from transformers import AutoModelForTokenClassification

from megappo.batch.exchange import Exchange
from megappo.checkpoint.store import CheckpointStore

NAMES = ("actor", "critic", "shared")


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run's checkpoint; `step.parents[2]` has the models that it started from."""
    return make_checkpoint(tmp_path_factory.mktemp("trained"))


def test_an_actor_to_hugging_face(step: Path, tmp_path: Path) -> None:
    root = step.parents[2]
    convert("megatron-to-hf", step / "actor", tmp_path / "actor", "--hf-config", root / "actor")
    assert_equal(tensors_of(tmp_path / "actor"), saved_weights(root, "actor"))
    convert("verify", step / "actor", tmp_path / "actor", "--hf-config", root / "actor")
    done = run(CONVERT, "megatron-to-hf", "--input", step, "--output", tmp_path / "new")
    assert done.returncode == 2
    assert f"name one of its components, {step / 'actor'}, {step / 'critic'}" in done.stderr


def test_a_critic_to_hugging_face(step: Path, tmp_path: Path) -> None:
    root = step.parents[2]
    convert("megatron-to-hf", step / "critic", tmp_path / "critic", "--hf-config", root / "critic")
    expected = saved_weights(root, "critic") | {"score.bias": torch.zeros(1)}
    assert_equal(tensors_of(tmp_path / "critic"), expected)
    model, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "Qwen2ForTokenClassification" and model.num_labels == 1
    assert read_config(tmp_path / "critic")["architectures"] == ["Qwen2ForTokenClassification"]


def test_both_halves_of_a_shared_backbone(step: Path, tmp_path: Path) -> None:
    root = step.parents[2]
    printed = convert("megatron-to-hf", step / "shared", tmp_path / "policy", "--hf-config", root / "shared")
    assert "has a value head besides, which is left out: --value-model" in printed
    whole = saved_weights(root, "shared")
    assert_equal(tensors_of(tmp_path / "policy"), {n: t for n, t in whole.items() if n != "score.weight"})
    convert("megatron-to-hf", step / "shared", tmp_path / "value", "--hf-config", root / "shared", "--value-model")
    critic = {name: tensor for name, tensor in whole.items() if name != "lm_head.weight"}
    assert_equal(tensors_of(tmp_path / "value"), critic | {"score.bias": torch.zeros(1)})


def go_on(rank: int, world_size: int, root: Path, folders: dict[str, Path]) -> None:
    """Train one more step from the checkpoint and from its resharded copy, in the new layout, and compare bitwise."""
    swapped = {"tensor": 1, "pipeline": 2}
    cases = {name: replace(case, layout=replace(case.layout, **swapped)) for name, case in CASES.items()}
    models = {name: root / name for name in NAMES}
    found = []
    for name, folder in folders.items():
        engines = build(models, cases)
        store = CheckpointStore(folder.parent, 0, Exchange(dist.group.WORLD))
        assert load_checkpoint(store, folder, engines) == {"step": 2}, name
        found.append((train(engines, 1), weights(engines, models)))
    (metrics, expected), (resharded_metrics, resharded) = found
    assert resharded_metrics == metrics
    assert_equal(resharded, expected)


def test_training_goes_on_from_a_resharded_checkpoint_to_the_bit(step: Path, tmp_path: Path) -> None:
    root, target = step.parents[2], tmp_path / "step_00000002"
    arguments = ("--hf-config", root / "actor", "--pipeline", 2)
    printed = convert("reshard", step, target, *arguments, ranks=2).splitlines()
    kept = "40 tensors of 148,608 elements, with the optimizer's state"
    assert printed[0] == f"actor: tensor 1 x pipeline 2 x expert 1, {kept}"
    assert printed[1].startswith("critic: tensor 1 x pipeline 2 x expert 1, ")
    assert json.loads((target / "state.json").read_text()) == {"step": 2}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=target, check=True)
    compared = convert("verify", step, target, "--hf-config", root / "actor").splitlines()
    assert compared[:3] == ["actor:", "equal to the bit: 40 tensors, 148,352 elements", "critic:"]
    assert compared[3].startswith("equal to the bit")
    run_ranks(2, go_on, root, {"original": step, "resharded": target})
    for name in NAMES:
        common = torch.load(step / name / "common.pt", weights_only=True)
        assert torch.load(target / name / "common.pt", weights_only=True) == common


def test_reshard_of_a_converted_model_keeps_what_stands_beside_it(step: Path, tmp_path: Path) -> None:
    root = step.parents[2]
    convert("hf-to-megatron", root / "actor", tmp_path / "model")
    convert("reshard", tmp_path / "model", tmp_path / "cut", "--tensor", 2, ranks=2)
    assert contents(tmp_path / "cut")["config.json"] == contents(tmp_path / "model")["config.json"]
    assert convert("verify", tmp_path / "cut", root / "actor").startswith("equal to the bit")
    done = run(CONVERT, "reshard", "--input", root / "actor", "--output", tmp_path / "new")
    assert done.returncode == 2
    assert "neither a converted model nor a training checkpoint" in done.stderr


def test_a_flipped_bit_in_a_checkpoint_is_named_before_anything_of_it_is_read(step: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "step_00000002"
    shutil.copytree(step, damaged)
    shard = sorted((damaged / "critic").glob("*.distcp"))[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    message = (
        f"error: {damaged} is damaged: critic/{shard.name} is altered or cut off, by its sum in SHA256SUMS; copy it"
    )
    hf_config = ("--hf-config", step.parents[2] / "actor")
    for command, source, target in (
        ("megatron-to-hf", damaged / "critic", tmp_path / "new"),
        ("reshard", damaged, tmp_path / "new"),
        ("verify", damaged, step),
        ("verify", step / "critic", damaged / "critic"),
    ):
        done = run(CONVERT, command, "--input", source, "--output", target, *hf_config)
        assert (done.returncode, done.stderr[: len(message)]) == (2, message)
    convert("megatron-to-hf", damaged / "actor", tmp_path / "new", *hf_config)
