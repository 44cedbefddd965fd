"""The converter with mixture-of-experts models and stages of different sizes, in one process and in several."""

import json
from pathlib import Path

import pytest
import torch
from commands import CONVERT, assert_equal, convert, run, tensors_of
from safetensors.torch import save_file
from tiny_models import hf_folder, sequences
from tiny_shapes import CHANGES, MIXTURES
from transformers import AutoModelForCausalLM


def mixture(root: Path, family: str) -> tuple[Path, Path]:
    """Write a random mixture-of-experts model in the hub's format, one tensor per expert, and in the fused format."""
    folder = hf_folder(root / "per_expert", family, **MIXTURES[family])
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(root / "fused", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_of(root / "fused"))
    return folder, root / "fused"


@pytest.mark.parametrize(
    ("family", "arguments", "ranks"),
    [
        ("mixtral", (), 1),
        pytest.param("mixtral", ("--expert", 2), 2, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", ("--tensor", 2, "--expert", 2), 2, marks=pytest.mark.slow),
        ("qwen3_moe", (), 1),
        ("qwen3_moe", ("--expert", 2), 2),
        pytest.param("deepseek_v2", ("--tensor", 2), 2, marks=pytest.mark.slow),
        ("deepseek_v3", ("--pipeline", 2, "--pipeline-split", "1,1"), 2),
    ],
)
def test_a_mixture_of_experts_there_and_back(tmp_path: Path, family: str, arguments: tuple, ranks: int) -> None:
    per_expert, fused = mixture(tmp_path, family)
    convert("hf-to-megatron", fused if ranks == 2 else per_expert, tmp_path / "megatron", *arguments, ranks=ranks)
    convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "back", *arguments, ranks=ranks)
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(per_expert))
    expected, again = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (per_expert, tmp_path / "back"))
    tokens = sequences()[0][None]
    assert torch.equal(again(tokens).logits, expected(tokens).logits)


def test_the_experts_of_a_checkpoint_are_compared_and_resharded(tmp_path: Path) -> None:
    per_expert, fused = mixture(tmp_path, "qwen3_moe")
    convert("hf-to-megatron", fused, tmp_path / "megatron")
    config = json.loads((fused / "config.json").read_text())
    assert json.loads((tmp_path / "megatron" / "config.json").read_text()) == config
    counts = f"{len(tensors_of(per_expert))} tensors, {sum(t.numel() for t in tensors_of(per_expert).values()):,}"
    for folder in (per_expert, fused):
        assert convert("verify", tmp_path / "megatron", folder) == f"equal to the bit: {counts} parameters\n"
    printed = convert("reshard", tmp_path / "megatron", tmp_path / "cut", "--expert", 2, ranks=2)
    assert "tensor 1 x pipeline 1 x expert 2" in printed
    assert all(any((tmp_path / "cut").glob(f"__{rank}_*.distcp")) for rank in (0, 1)), "a rank wrote nothing"
    convert("verify", tmp_path / "cut", tmp_path / "megatron")
    convert("megatron-to-hf", tmp_path / "cut", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(per_expert))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("gpt_oss", ("--expert", 2)),
        ("qwen3_next", ("--expert", 2)),
        ("minimax_m2", ()),
        ("olmo3", ()),
        ("gemma4_text", ()),
    ],
)
def test_what_a_family_of_its_own_has_there_and_back(tmp_path: Path, family: str, arguments: tuple) -> None:
    """Stacks of experts with sinks; linear attention; norms of all heads; heads of two sizes."""
    source = hf_folder(tmp_path / "source", family, **CHANGES[family])
    convert("hf-to-megatron", source, tmp_path / "megatron", "--tensor", 2, *arguments, ranks=2)
    assert convert("verify", tmp_path / "megatron", source).startswith("equal to the bit")
    convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "back", "--pipeline", 2, ranks=2)
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(source))


def test_layers_that_predict_further_tokens_are_no_difference(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "source", "deepseek_v3", **MIXTURES["deepseek_v3"], num_nextn_predict_layers=1)
    further = {"model.layers.2.eh_proj.weight": torch.ones(32, 64)}
    save_file(tensors_of(source) | further, source / "model.safetensors", {"format": "pt"})
    convert("hf-to-megatron", source, tmp_path / "megatron")
    for folder in (tmp_path / "megatron", source):
        assert convert("verify", folder, source).startswith("equal to the bit")


def test_stages_of_different_sizes(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "source", "llama", num_hidden_layers=5, tie_word_embeddings=True)
    split = ("--pipeline", 2, "--pipeline-split", "2,3")
    convert("hf-to-megatron", source, tmp_path / "megatron", *split, ranks=2)
    convert("verify", tmp_path / "megatron", source)
    convert("hf-to-megatron", source, tmp_path / "whole")
    convert("reshard", tmp_path / "whole", tmp_path / "cut", *split, ranks=2)
    convert("megatron-to-hf", tmp_path / "cut", tmp_path / "back", *split, ranks=2)
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(source))


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        (("--pipeline", 2), 2, "--pipeline 2 x virtual_pipeline 1 = 2 does not divide num_hidden_layers 5 of"),
        (
            ("--pipeline", 2, "--pipeline-split", "2,2"),
            2,
            "--pipeline-split [2, 2] has 4 layers together, num_hidden_layers of",
        ),
        pytest.param(
            *(("--pipeline", 2, "--pipeline-split", "5"), 2, "--pipeline-split 5 names 1 stages, --pipeline 2"),
            marks=pytest.mark.slow,
        ),
        (("--pipeline-split", "5,0", "--pipeline", 2), 2, "--pipeline-split: 0 is not 1 or more"),
        pytest.param(
            *(("--expert", 2), 2, "config.json is of a dense model, without experts: set it to 1"),
            marks=pytest.mark.slow,
        ),
        (("--expert", 2), 1, "config.json is of a dense model, without experts: set it to 1"),  # starts two processes
        (("--tensor", 0), 1, "--tensor: 0 is not 1 or more"),
    ],
)
def test_a_layout_that_does_not_fit(tmp_path: Path, arguments: tuple, ranks: int, message: str) -> None:
    source = hf_folder(tmp_path / "source", "llama", num_hidden_layers=5, tie_word_embeddings=False)
    done = run(CONVERT, "hf-to-megatron", "--input", source, "--output", tmp_path / "new", *arguments, ranks=ranks)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
