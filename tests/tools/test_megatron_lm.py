"""Checkpoints of Megatron-LM: stock megatron-core writes what the converter reads, and reads what it writes."""

from pathlib import Path

import pytest
import torch
from commands import CONVERT, convert, run
from megatron.core import dist_checkpointing, parallel_state
from spawn import run_ranks
from stock_megatron import SHAPE, TOKENS, stock_model, write_stock
from tiny_models import hf_folder
from tiny_shapes import QWEN3_5
from transformers import AutoModelForCausalLM


def check_read(rank: int, world_size: int, written: Path, converted: Path, tensor: int, pipeline: int) -> None:
    """Compare what stock megatron-core loads from both checkpoints, row by row of the true vocabulary."""
    model = stock_model(tensor, pipeline)
    loaded = []
    for path in (written / "iter_0000007", converted / "release"):
        for parameter in model.parameters():
            parameter.data.fill_(0)
        dist_checkpointing.load({"model": model.sharded_state_dict()}, str(path))
        loaded.append({name: parameter.data.clone() for name, parameter in model.named_parameters()})
    for name, expected in loaded[0].items():
        rows = len(expected)
        if "embedding" in name or "output_layer" in name:
            rows = min(rows, SHAPE["vocab_size"] - rows * parallel_state.get_tensor_model_parallel_rank())
        assert expected.abs().sum() > 0
        assert torch.equal(loaded[1][name][:rows], expected[:rows]), name


@pytest.mark.parametrize(
    ("tensor", "pipeline", "between"),
    [(2, 1, 2), *(pytest.param(2, 2, between, marks=pytest.mark.slow) for between in (1, 2, 4))],
)
def test_a_checkpoint_of_megatron_lm_there_and_back(tensor: int, pipeline: int, between: int, tmp_path: Path) -> None:
    """It is read and written again by `between` tensor-parallel ranks."""
    written, logits, ranks = tmp_path / "written", tmp_path / "logits.pt", tensor * pipeline
    config = hf_folder(tmp_path / "config", "llama", **SHAPE)
    run_ranks(ranks, write_stock, written, tensor, pipeline, logits)
    printed = convert(
        "megatron-to-hf", written, tmp_path / "hf", "--hf-config", config, "--tensor", between, ranks=between
    )
    assert "56 rows of the vocabulary beyond config.json's vocab_size 200 are left out as padding" in printed
    if pipeline == 1:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        assert torch.allclose(model(TOKENS).logits, torch.load(logits), atol=1e-5)
    convert(
        "hf-to-megatron", tmp_path / "hf", tmp_path / "converted", "--megatron-lm", "--tensor", between, ranks=between
    )
    convert("verify", tmp_path / "converted", tmp_path / "hf")
    run_ranks(ranks, check_read, written, tmp_path / "converted", tensor, pipeline)


def test_linear_attention_has_other_names_in_megatron_lm(tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "model", "qwen3_5_text", **QWEN3_5)
    done = run(CONVERT, "hf-to-megatron", "--input", model, "--output", tmp_path / "new", "--megatron-lm")
    assert done.returncode == 2 and not (tmp_path / "new").exists()
    assert f"Megatron-LM has other names for the linear attention of {model}: leave the option out" in done.stderr
