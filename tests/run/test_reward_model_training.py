"""Whole runs of `megappo reward-model`: transformers' scores, every layout, resuming to the bit, PPO on the result."""

import json
import math
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from example_runs import finish, megappo, write_config
from program import OF_CLOCKS, Program, logged
from safetensors.torch import load_file
from tiny_shapes import EXPERTS
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from megappo.batch.rows_file import RowsFile

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


def check_export(finished: Path, pairs_config: Path) -> None:
    """Check the last evaluation against transformers' scores of the exported model."""
    steps = {metrics["step"]: metrics for metrics in logged(finished)}
    last = steps[max(steps)]
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
    assert last["val/held_out_pairs/margin"] == pytest.approx(differences.mean().item(), abs=1e-5)
    loss = torch.nn.functional.softplus(-differences).mean().item()
    assert last["val/held_out_pairs/loss"] == pytest.approx(loss, abs=1e-5)
    assert last["val/held_out_pairs/accuracy"] == (differences > 0).float().mean().item()
    assert loss < steps[0]["val/held_out_pairs/loss"] and 0 <= last["val/held_out_pairs/calibration_error"] <= 0.5


def test_the_export_scores_as_the_run_did(finished, pairs_config):
    check_export(finished, pairs_config)
    assert logged(finished)[-1]["val/held_out_pairs/accuracy"] > 0.9


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_actor_critic_and_reward_model_share_a_base_with_an_adapter_each(tmp_path, pairs_config, config):
    """The policy is scored by the adapters as transformers scores by the model into which they are merged."""
    adapters = ("reward_model.lora={rank: 4, alpha: 8}", "reward_model.optim.lr=2e-2")
    judge = run(tmp_path / "judge", pairs_config, "run", *adapters) / "hf_reward_model"
    check_export(judge.parent, pairs_config)
    base, record = config.parent / "model", tmp_path / "record"
    settings = (
        *(
            "actor.lora.rank=4",
            "critic.lora.rank=2",
            "critic.parallel={tensor: 2, pipeline: 1}",
            "reward.function=null",
        ),
        *(f"reward_model={{model_path: {base}, adapter: {judge}/adapter}}", "actor.use_kl_loss=true"),
        *("algorithm.use_kl_in_reward=false", "trainer.total_steps=2"),
        "actor.offload=[weights,optimizer]",
    )
    steps = logged(run(tmp_path / "ppo", config, "ppo", *settings, f"trainer.record_rollouts={record}", command=PPO))
    output = f"trainer.output_dir={tmp_path / 'planned'}"
    command = (*megappo("plan"), config, *settings, output, "--world-size", "2", "--gpu", "h100", "model.dtype=bf16")
    plan = subprocess.run(command, capture_output=True, text=True).stdout
    for name in ("critic", "ref", "reward_model"):
        assert f"{name}, with the weights of the actor" in plan, plan
    merged = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    for metrics in steps[1:]:
        with RowsFile(record / f"step_{metrics['step']:08d}.safetensors") as file, torch.no_grad():
            scores = torch.cat([merged(row[None]).logits[0] for row in file.rows(0, len(file.table)).sequences])
        assert scores.std() > 0.1
        for kind in ("mean", "max", "min"):
            assert metrics[f"reward/model/{kind}"] == pytest.approx(float(getattr(scores, kind)()), abs=1e-4)
        assert metrics["actor/grad_norm"] > 0 and metrics["critic/grad_norm"] > 0


@pytest.mark.slow
def test_a_mixture_of_experts_is_trained_over_expert_parallel_ranks(tmp_path, pairs_config):
    shape = json.loads((pairs_config.parent / "model" / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: shape[name] for name in (*kept, "max_position_embeddings", "pad_token_id", "eos_token_id")}
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model("qwen3_moe", **sizes, **EXPERTS, head_dim=8, num_labels=1)
    )
    shutil.copytree(pairs_config.parent / "model", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(tmp_path / "model")
    found = []
    for name, layout in (("whole", "{tensor: 1}"), ("experts", "{tensor: 1, expert: 2}")):
        settings = (f"model.path={tmp_path / 'model'}", f"reward_model.parallel={layout}", "trainer.total_steps=1")
        finished = run(tmp_path / name, pairs_config, "run", *settings, "trainer.eval_interval=1")
        check_export(finished, pairs_config)
        found.append(logged(finished)[-1])
    for name in ("reward_model/bt_loss", "reward_model/grad_norm", "val/held_out_pairs/loss"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4), name
