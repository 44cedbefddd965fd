"""Whole runs of `megappo sft`: the loss and the gradient of Hugging Face, every layout, resuming to the bit."""

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from example_runs import finish, megappo, write_config
from program import OF_CLOCKS, Program, logged
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

COMMAND = megappo("sft")
run = partial(finish, command=COMMAND)


@pytest.fixture(scope="session")
def sft_config(config: Path) -> Path:
    """Write a config of sft for the tiny model: sums to learn, in their order."""
    folder = config.parent
    for name in ("train", "held_out"):
        prompts = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        lines = [json.dumps({"question": one["prompt"], "answer": one["label"]}) for one in prompts]
        (folder / f"{name}_examples.jsonl").write_text("\n".join(lines) + "\n")
    files = [folder / f"{name}_examples.jsonl" for name in ("train", "held_out")]
    return write_config(folder / "sft.yaml", "sft", "actor", 40, files)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, sft_config: Path) -> Path:
    return run(tmp_path_factory.mktemp("sft"), sft_config, "run")


def mean_loss(model: torch.nn.Module, folder: Path, file: Path, rows: slice) -> torch.Tensor:
    """Return the mean cross-entropy of the answers and their end tokens, one example at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    losses = []
    for line in file.read_text().splitlines()[rows]:
        record = json.loads(line)
        prompt = tokenizer(record["question"], add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(record["answer"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        logits = model(torch.tensor([prompt + answer])).logits[0]
        losses.append(F.cross_entropy(logits[len(prompt) - 1 : -1], torch.tensor(answer), reduction="none"))
    return torch.cat(losses).mean()


def test_loss_gradient_and_export_are_those_of_hugging_face(finished, sft_config):
    folder, steps = sft_config.parent, {metrics["step"]: metrics for metrics in logged(finished)}
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    loss = mean_loss(model, folder / "model", folder / "train_examples.jsonl", slice(0, 8))
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert steps[1]["actor/nll_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert steps[1]["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    trained = AutoModelForCausalLM.from_pretrained(finished / "hf_actor")
    held_out = mean_loss(trained, finished / "hf_actor", folder / "held_out_examples.jsonl", slice(None))
    assert steps[4]["val/held_out_examples/loss"] == pytest.approx(held_out.item(), rel=1e-5)
    assert steps[4]["val/held_out_examples/loss"] < steps[0]["val/held_out_examples/loss"]
    assert steps[4]["data/epochs"] == pytest.approx(32 / 56) and steps[1]["data/num_examples"] == 8


def test_the_run_is_shown_as_what_it_is(finished):
    output = (finished.parent / "program" / "output.txt").read_text()
    assert re.search(r"step +loss +val_loss +grad_norm +lr +epochs", output) and "held-out loss" in output
    assert "Held-out loss" in (finished / "report.html").read_text()
    assert yaml.safe_load((finished / "config.yaml").read_text())["trainer"]["kind"] == "sft"


def test_keys_of_ppo_are_refused_with_the_remedy(tmp_path, sft_config):
    overrides = ("rollout.n=4", "actor.clip_ratio=0.1", f"trainer.output_dir={tmp_path / 'run'}")
    with Program(tmp_path, sft_config, *overrides, command=COMMAND) as program:
        assert program.wait() == 2
        for key in ("rollout.n 4", "actor.clip_ratio 0.1"):
            assert f"{key} has no effect, as trainer.kind is sft: drop it, or change trainer.kind" in program.output


def same_apart_from_clocks(left: dict, right: dict) -> None:
    for name in left.keys() | right.keys():
        if not re.search(f"{OF_CLOCKS}|^checkpoint/|^data/tokens_per_second", name):
            assert left[name] == right[name] or math.isnan(left[name]), name


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_bit(tmp_path, finished, sft_config):
    for steps in (2, 4):
        run(tmp_path, sft_config, "run", f"trainer.total_steps={steps}")
    for left, right in zip(logged(finished)[3:], logged(tmp_path / "run")[3:], strict=True):
        same_apart_from_clocks(left, right)
    files = [folder / "hf_actor" / "model.safetensors" for folder in (finished, tmp_path / "run")]
    left, right = map(load_file, files)
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("actor.parallel.tensor=1",),
        ("actor.parallel.tensor=1", "actor.parallel.pipeline=2"),
        ("actor.parallel.tensor=1", "actor.parallel.context=2", "actor.max_tokens_per_micro_batch=512"),
        ("actor.parallel.sequence=true", "actor.max_tokens_per_micro_batch=12", "actor.offload=[optimizer,weights]"),
    ],
    ids=["data", "pipeline", "context", "small micro-batches and offload"],
)
def test_layouts_and_micro_batches_do_not_change_the_run(tmp_path, finished, sft_config, overrides):
    for left, right in zip(logged(finished), logged(run(tmp_path, sft_config, "run", *overrides)), strict=True):
        for name in ("actor/nll_loss", "actor/grad_norm", "val/held_out_examples/loss"):
            assert (name in left) == (name in right) and left.get(name, 0) == pytest.approx(
                right.get(name, 0), rel=1e-3
            )
