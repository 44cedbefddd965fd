"""Steps on examples: the loss and the gradient of Hugging Face, over data-parallel ranks and micro-batches."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from spawn import run_ranks
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megappo.config.schema import Config
from megappo.engines.handle import EngineHandle
from megappo.observe.loggers import Outlook
from megappo.placement.run_plan import plan_run

ANSWERS = ["7", "77+", "7+7", "+"]


def steps(rank: int, world_size: int, values: dict, folder: Path) -> None:
    from megappo.recipes.reward_model import reward_model_loss
    from megappo.recipes.sft import sft_loss
    from megappo.trainer.fine_tuning import example_step
    from megappo.trainer.main import build_run  # of the ranks: this process has imported Megatron otherwise

    config = Config.model_validate(values)
    with ExitStack() as cleanup:
        run = build_run(plan_run(config, world_size), EngineHandle(), Outlook(), cleanup)
        held_out = run.evaluate(0)
        loss_of = sft_loss if config.trainer.kind == "sft" else reward_model_loss
        metrics = [example_step(run, step, loss_of) for step in (1, 2)]
    if rank == 0:
        (folder / "found.json").write_text(json.dumps([held_out, *metrics]))


def test_a_step_is_hugging_faces(tmp_path: Path, config: Path) -> None:
    model = config.parent / "model"
    records = [{"prompt": f"{i}+{i}=", "response": answer} for i, answer in enumerate(ANSWERS)]
    data = tmp_path / "examples.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {
        "model": {"path": str(model), "dtype": "fp32"},
        "actor": {"optim": {"lr": 1e-2}, "max_tokens_per_micro_batch": 10},
        "data": {"train_files": str(data), "val_files": str(data), "train_batch_size": 4, "max_length": 10}
        | {"shuffle": False},
        "trainer": {"kind": "sft", "output_dir": str(tmp_path / "run"), "total_steps": 2, "loggers": []},
    }
    run_ranks(2, steps, values, tmp_path)
    held_out, first, second = json.loads((tmp_path / "found.json").read_text())
    expected = AutoModelForCausalLM.from_pretrained(model)
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    losses = []
    for record in records:
        prompt, answer = ([vocabulary[character] for character in record[name]] for name in ("prompt", "response"))
        answer.append(expected.config.eos_token_id)
        logits = expected(torch.tensor([prompt + answer])).logits[0]
        losses.append(F.cross_entropy(logits[len(prompt) - 1 : -1], torch.tensor(answer), reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in expected.parameters()]).norm()
    assert first["actor/nll_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert held_out["val/examples/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert first["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert second["actor/nll_loss"] < first["actor/nll_loss"] and second["data/epochs"] == 2
    assert first["data/trained_tokens"] == sum(len(answer) + 1 for answer in ANSWERS)


PAIRS = [("7", "77+", 0.0), ("77+", "+", 0.5), ("7+7+7", "7", 1.0), ("+", "7", 0.0)]
COEF = 0.1


def test_a_step_of_a_reward_model_is_hugging_faces(tmp_path: Path, config: Path) -> None:
    model, judge = config.parent / "model", tmp_path / "judge"
    torch.manual_seed(3)
    expected = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    expected.score.weight.data *= 20
    expected.save_pretrained(judge)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, judge / name)
    records = []
    for i, (chosen, rejected, margin) in enumerate(PAIRS):
        records.append({"prompt": f"{i}+{i}=", "chosen": chosen, "rejected": rejected, "margin": margin})
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {
        "model": {"path": str(judge), "dtype": "fp32"},
        "reward_model": {"optim": {"lr": 1e-2}, "max_tokens_per_micro_batch": 20, "center_coef": COEF},
        "data": {"train_files": str(data), "val_files": str(data), "train_batch_size": 4, "max_length": 10}
        | {"shuffle": False},
        "trainer": {"kind": "reward_model", "output_dir": str(tmp_path / "run"), "total_steps": 2, "loggers": []},
    }
    run_ranks(2, steps, values, tmp_path)
    held_out, first, second = json.loads((tmp_path / "found.json").read_text())
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    differences, losses, centers = [], [], []
    for record in records:
        scores = []
        for side in ("chosen", "rejected"):
            tokens = [vocabulary[character] for character in record["prompt"] + record[side]]
            scores.append(expected(torch.tensor([[*tokens, expected.config.eos_token_id]])).logits[0, 0])
        differences.append(scores[0] - scores[1])
        losses.append(F.softplus(record["margin"] - differences[-1]))
        centers.append((scores[0] + scores[1]) ** 2)
    loss, center, differences = (torch.stack(part) for part in (losses, centers, differences))
    (loss.mean() + COEF * center.mean()).backward()
    norm = torch.stack([weight.grad.norm() for weight in expected.parameters()]).norm()
    assert first["reward_model/bt_loss"] == pytest.approx(loss.mean().item(), rel=1e-5)
    assert first["reward_model/center_loss"] == pytest.approx(center.mean().item(), rel=1e-4)
    assert first["reward_model/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    accuracy = (differences > 0).float().mean().item()
    assert first["reward_model/accuracy"] == held_out["val/pairs/accuracy"] == pytest.approx(accuracy)
    assert held_out["val/pairs/loss"] == pytest.approx(F.softplus(-differences).mean().item(), rel=1e-5)
    assert held_out["val/pairs/margin"] == pytest.approx(differences.mean().item(), abs=1e-5)
    assert second["reward_model/bt_loss"] < first["reward_model/bt_loss"] and second["data/epochs"] == 2
    assert first["data/num_examples"] == 4 and first["data/trained_tokens"] == 8
