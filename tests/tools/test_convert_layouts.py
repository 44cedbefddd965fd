"""The converter with mixtures of experts and stages of different sizes, in one process and in several."""

import json
from pathlib import Path

import pytest
from commands import CONVERT, assert_equal, convert, run, tensors_of
from tiny_models import hf_folder, sequences
from transformers import AutoModelForCausalLM

EXPERTS = {"num_experts": 4, "moe_intermediate_size": 24, "num_hidden_layers": 2}
MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_hidden_layers": 2},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": EXPERTS,
}


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random mixture of experts in the hub's format, a tensor per expert, and in transformers' own, fused."""
    root = tmp_path_factory.mktemp(request.param)
    folder = hf_folder(root / "per_expert", request.param, **MIXTURES[request.param])
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(root / "fused", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors_of(root / "fused"))
    return folder, root / "fused"


@pytest.mark.parametrize(
    ("arguments", "ranks"), [((), 1), (("--expert", 2), 2), (("--tensor", 2, "--expert", 2), 2), (("--pipeline", 2), 2)]
)
def test_a_mixture_of_experts_there_and_back(
    mixture: tuple[Path, Path], tmp_path: Path, arguments: tuple, ranks: int
) -> None:
    per_expert, fused = mixture
    convert("hf-to-megatron", fused if ranks == 2 else per_expert, tmp_path / "megatron", *arguments, ranks=ranks)
    convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "back", *arguments, ranks=ranks)
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(per_expert))
    printed = convert("verify", tmp_path / "megatron", per_expert)
    assert printed.startswith(f"equal to the bit: {len(tensors_of(per_expert))} tensors")
    expected, again = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (per_expert, tmp_path / "back"))
    tokens = sequences()[0][None]
    assert (again(tokens).logits == expected(tokens).logits).all()


def test_a_fused_folder_is_compared_by_expert(mixture: tuple[Path, Path], tmp_path: Path) -> None:
    per_expert, fused = mixture
    convert("hf-to-megatron", fused, tmp_path / "megatron")
    assert convert("verify", tmp_path / "megatron", fused) == convert("verify", tmp_path / "megatron", per_expert)


def test_the_experts_of_a_checkpoint_are_cut_anew(mixture: tuple[Path, Path], tmp_path: Path) -> None:
    per_expert, _ = mixture
    convert("hf-to-megatron", per_expert, tmp_path / "megatron")
    printed = convert("reshard", tmp_path / "megatron", tmp_path / "cut", "--expert", 2, ranks=2)
    assert "-> tensor 1 x pipeline 1 x expert 2" in printed
    both = [set(part.name for part in (tmp_path / "cut").glob(f"__{rank}_*.distcp")) for rank in (0, 1)]
    assert all(both), "a rank wrote nothing"
    convert("megatron-to-hf", tmp_path / "cut", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(per_expert))


def test_stages_of_different_sizes(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "source", "llama", num_hidden_layers=5, tie_word_embeddings=True)
    split = ("--pipeline", 2, "--pipeline-split", "2,3")
    convert("hf-to-megatron", source, tmp_path / "megatron", *split, ranks=2)
    convert("verify", tmp_path / "megatron", source)
    convert("hf-to-megatron", source, tmp_path / "whole")
    convert("reshard", tmp_path / "whole", tmp_path / "cut", *split, ranks=2)
    for name in ("megatron", "cut"):
        convert("megatron-to-hf", tmp_path / name, tmp_path / f"{name}_back")
        assert_equal(tensors_of(tmp_path / f"{name}_back"), tensors_of(source))


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        (("--pipeline", 2), 2, "num_hidden_layers = 5 does not divide by --pipeline = 2, and no --pipeline-split says"),
        (("--pipeline", 2, "--pipeline-split", "2,2"), 2, "--pipeline-split = [2, 2] is not num_hidden_layers = 5"),
        (("--pipeline", 2, "--pipeline-split", "5"), 2, "--pipeline-split 5 names 1 stages, --pipeline 2"),
        (("--pipeline-split", "5,0", "--pipeline", 2), 2, "--pipeline-split: 0 is not 1 or more"),
        (("--expert", 2), 2, "--expert = 2, but LlamaForCausalLM has no experts"),
        (("--expert", 2), 1, "with --expert 2 needs 2 processes, this run has 1: start it with"),
        (("--tensor", 0), 1, "--tensor: 0 is not 1 or more"),
    ],
)
def test_a_layout_that_does_not_fit(tmp_path: Path, arguments: tuple, ranks: int, message: str) -> None:
    source = hf_folder(tmp_path / "source", "llama", num_hidden_layers=5)
    done = run(CONVERT, "hf-to-megatron", "--input", source, "--output", tmp_path / "new", *arguments, ranks=ranks)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_config_of_a_mixture_survives(mixture: tuple[Path, Path], tmp_path: Path) -> None:
    per_expert, fused = mixture
    convert("hf-to-megatron", fused, tmp_path / "megatron")
    convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "back")
    kept = [json.loads((folder / "config.json").read_text()) for folder in (fused, tmp_path / "back")]
    assert {key: kept[1][key] for key in kept[0]} == kept[0]
