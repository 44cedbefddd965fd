"""Runs that start from Megatron folders train as runs that start from Hugging Face folders of the same weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import assert_equal, convert, tensors_of
from program import Program, logged, trained_on
from spawn import run_ranks
from stock_megatron import SHAPE, write_stock
from tiny_folders import read_config
from tiny_models import hf_folder
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]  # tests/checkpoint has what is loaded
STEPS = ("trainer.total_steps=2", "trainer.eval_interval=0", "trainer.save_interval=0")


def train(folder: Path, config: Path, *overrides: object) -> str:
    with Program(folder, config, f"trainer.output_dir={folder / 'run'}", *STEPS, *map(str, overrides)) as program:
        assert program.wait() == 0, program.output
        return program.output


def check_equal_starts(folder: Path, config: Path, megatron: list[str], hugging_face: list[str]) -> None:
    """Train from Megatron folders with an engine, and on its record from Hugging Face folders."""
    record = folder / "record"
    train(folder / "megatron", config, *megatron, f"trainer.record_rollouts={record}")
    steps = logged(folder / "megatron" / "run")
    assert all(one["sync/log_prob_diff/max"] < 1e-4 and one["rollout/log_prob_diff/mean"] < 1e-4 for one in steps)
    train(folder / "hf", config, *hugging_face, f"trainer.replay_rollouts={record}")
    found, expected = trained_on(folder / "megatron" / "run"), trained_on(folder / "hf" / "run")
    assert len(found) == 2 and found == expected
    for name in ("hf_actor", "hf_critic"):
        assert_equal(tensors_of(folder / "megatron" / "run" / name), tensors_of(folder / "hf" / "run" / name))


def with_tokenizer(folder: Path, model: Path) -> Path:
    """Give a folder the tiny run's tokenizer."""
    for file in model.glob("*token*"):
        shutil.copy(file, folder)
    return folder


def test_folders_that_the_converter_wrote(config: Path, folder: Path) -> None:
    """Engines load other weights than training starts from, so that only a sync makes them agree."""
    torch.manual_seed(5)
    model = Qwen2ForCausalLM.from_pretrained(config.parent / "model")
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder / "other")
    critic = Qwen2ForTokenClassification.from_pretrained(folder / "other", num_labels=1)
    critic.score.bias.data.fill_(0.25)
    critic.save_pretrained(folder / "critic")
    for name in ("other", "critic"):
        with_tokenizer(folder / name, config.parent / "model")
    convert("hf-to-megatron", folder / "other", folder / "lm", "--megatron-lm", "--tensor", 2, ranks=2)
    convert("hf-to-megatron", folder / "critic", folder / "value", "--value-model")
    megatron = [f"model.dist_checkpointing_path={folder / 'lm'}", f"critic.dist_checkpointing_path={folder / 'value'}"]
    hugging_face = [f"model.path={folder / 'other'}", f"critic.model_path={folder / 'critic'}"]
    check_equal_starts(folder, config, megatron, hugging_face)


def test_a_folder_of_stock_megatron_core_in_another_layout(config: Path, folder: Path) -> None:
    """Actor, reference and critic start from it; the critic draws a head."""
    of_tiny = read_config(config.parent / "model")
    same = {name: of_tiny[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    model = with_tokenizer(hf_folder(folder / "model", "llama", **SHAPE | same), config.parent / "model")
    run_ranks(4, write_stock, folder / "written", 2, 2, folder / "logits.pt")
    convert("megatron-to-hf", folder / "written", folder / "hf_folder", "--hf-config", model)
    megatron = [f"model.path={model}", f"model.dist_checkpointing_path={folder / 'written'}"]
    check_equal_starts(folder, config, megatron, [f"model.path={folder / 'hf_folder'}"])


def test_an_evaluation_of_a_megatron_folder(config: Path, folder: Path) -> None:
    """It scores as the Hugging Face folder does."""
    convert("hf-to-megatron", config.parent / "model", folder / "lm", "--megatron-lm")
    other = folder / "other"
    shutil.copytree(config.parent / "model", other)
    model = Qwen2ForCausalLM.from_pretrained(other)
    for parameter in model.parameters():
        parameter.data += 0.3
    model.save_pretrained(other)
    from_megatron = [f"model.path={other}", f"model.dist_checkpointing_path={folder / 'lm'}"]
    found = []
    for name, overrides in {"hf": [], "megatron": from_megatron}.items():
        train(folder / name, config, "trainer.eval_only=true", "rollout.val_temperature=0", *overrides)
        (run,) = (folder / name / "run" / "evaluations").iterdir()
        rows = [json.loads(line) for line in (run / "rollouts" / "step_00000000.jsonl").read_text().splitlines()]
        found.append([row["response"] for row in rows])
    assert len(found[0]) == 8 and found[0] == found[1]
