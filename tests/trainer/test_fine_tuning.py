"""Steps of fine-tuning: the loss and the gradient of Hugging Face, over data-parallel ranks and micro-batches."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from spawn import run_ranks
from transformers import AutoModelForCausalLM

from megappo.config.schema import Config
from megappo.engines.handle import EngineHandle
from megappo.placement.run_plan import plan_run

ANSWERS = ["7", "77+", "7+7", "+"]


def steps(rank: int, world_size: int, values: dict, folder: Path) -> None:
    from megappo.trainer.main import build_run, sft_step  # of the ranks: this process has imported Megatron otherwise

    config = Config.model_validate(values)
    with ExitStack() as cleanup:
        run = build_run(plan_run(config, world_size), EngineHandle(), cleanup)
        held_out = run.evaluate(0)
        metrics = [sft_step(run, step) for step in (1, 2)]
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
