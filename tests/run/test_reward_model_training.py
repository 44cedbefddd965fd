"""Whole runs of `megappo reward-model`: transformers' scores, every layout, resuming to the bit, PPO on the result."""

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from example_runs import finish, megappo, write_config
from program import OF_CLOCKS, Program, logged
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

COMMAND, PPO = megappo("reward-model"), megappo("train")
run = partial(finish, command=COMMAND)


@pytest.fixture(scope="session")
def pairs_config(config: Path) -> Path:
    """Write a config of a reward model for the tiny model: more sevens are better."""
    folder = config.parent
    for name in ("train", "held_out"):
        prompts = [json.loads(line)["prompt"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        pairs = [{"prompt": one, "chosen": "7" * (1 + i % 3), "rejected": one[:2]} for i, one in enumerate(prompts)]
        (folder / f"{name}_pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    files = [folder / f"{name}_pairs.jsonl" for name in ("train", "held_out")]
    return write_config(folder / "pairs.yaml", "reward_model", "reward_model", 64, files)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, pairs_config: Path) -> Path:
    return run(tmp_path_factory.mktemp("reward_model"), pairs_config, "run")


def test_the_export_scores_as_the_run_did(finished, pairs_config):
    steps = {metrics["step"]: metrics for metrics in logged(finished)}
    folder = finished / "hf_reward_model"
    judge, loaded = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(loaded.values()) and judge.config.num_labels == 1 and judge.config.pad_token_id is not None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = map(json.loads, (pairs_config.parent / "held_out_pairs.jsonl").read_text().splitlines())
    texts = [pair["prompt"] + pair[side] + "<eos>" for pair in pairs for side in ("chosen", "rejected")]
    batch = tokenizer(texts, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        scores = judge(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.view(-1, 2)
    differences = scores[:, 0] - scores[:, 1]
    assert steps[4]["val/held_out_pairs/margin"] == pytest.approx(differences.mean().item(), abs=1e-5)
    loss = torch.nn.functional.softplus(-differences).mean().item()
    assert steps[4]["val/held_out_pairs/loss"] == pytest.approx(loss, abs=1e-5)
    assert steps[4]["val/held_out_pairs/accuracy"] == (differences > 0).float().mean().item() > 0.9
    assert loss < steps[0]["val/held_out_pairs/loss"] and 0 <= steps[4]["val/held_out_pairs/calibration_error"] <= 0.5


def test_the_run_is_shown_as_what_it_is(finished):
    output = (finished.parent / "program" / "output.txt").read_text()
    assert re.search(r"step +loss +val_loss +accuracy +val_acc +grad_norm", output) and "held-out accuracy" in output
    assert f"reward_model.model_path={finished / 'hf_reward_model'}" in output
    assert "Calibration error" in (finished / "report.html").read_text()


@pytest.mark.slow
def test_keys_of_others_are_refused_with_the_remedy(tmp_path, pairs_config):
    overrides = ("rollout.n=4", "actor.optim.lr=0.1", "reward_model.weight=2", "data.train_on=last")
    with Program(tmp_path, pairs_config, *overrides, f"trainer.output_dir={tmp_path / 'run'}", command=COMMAND) as one:
        assert one.wait() == 2
        for key in ("rollout.n 4", "actor.optim.lr 0.1", "reward_model.weight 2.0", 'data.train_on "last"'):
            assert f"{key} has no effect, as trainer.kind is reward_model: drop it" in one.output


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_bit(tmp_path, finished, pairs_config):
    for steps in (2, 4):
        run(tmp_path, pairs_config, "run", f"trainer.total_steps={steps}")
    for left, right in zip(logged(finished)[3:], logged(tmp_path / "run")[3:], strict=True):
        for name in left.keys() | right.keys():
            if not re.search(f"{OF_CLOCKS}|^checkpoint/|^data/tokens_per_second", name):
                assert left[name] == right[name] or math.isnan(left[name]), name
    files = [folder / "hf_reward_model" / "model.safetensors" for folder in (finished, tmp_path / "run")]
    left, right = map(load_file, files)
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("reward_model.parallel.tensor=1",),
        ("reward_model.parallel.tensor=1", "reward_model.parallel.pipeline=2"),
        ("reward_model.parallel.tensor=1", "reward_model.parallel.context=2"),
        (
            *("reward_model.parallel.sequence=true", "reward_model.max_tokens_per_micro_batch=24"),
            "reward_model.offload=[optimizer,weights,gradients]",
        ),
    ],
    ids=["data", "pipeline", "context", "small micro-batches and offload"],
)
def test_layouts_and_micro_batches_do_not_change_the_run(tmp_path, finished, pairs_config, overrides):
    for left, right in zip(logged(finished), logged(run(tmp_path, pairs_config, "run", *overrides)), strict=True):
        for name in ("reward_model/bt_loss", "reward_model/grad_norm", "val/held_out_pairs/loss"):
            assert (name in left) == (name in right) and left.get(name, 0) == pytest.approx(
                right.get(name, 0), rel=1e-3
            )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ppo_is_scored_by_the_result(tmp_path, finished, config):
    judge = f"reward_model.model_path={finished / 'hf_reward_model'}"
    steps = logged(run(tmp_path, config, "ppo", judge, "reward.function=null", "trainer.total_steps=1", command=PPO))
    assert steps[-1]["reward/model/mean"] == pytest.approx(steps[-1]["reward/score/mean"], abs=1e-6)
