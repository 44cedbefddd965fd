"""Operations of a forward pass, against torch's count for Hugging Face's model, and published MFU."""

from pathlib import Path

import pytest
import torch
from tiny_models import hf_folder, hf_model
from tiny_shapes import CHANGES
from torch.utils.flop_counter import FlopCounterMode

from megappo.architecture.flops import TRAINING, flops_of
from megappo.architecture.parsing import parse, read_architecture

TOKENS = 40


def counted_by_torch(folder: Path) -> int:
    model = hf_model(folder)
    model.set_attn_implementation("eager")  # whole squares of scores, where ours are what is causal
    model.set_experts_implementation("eager")  # one expert after the other, in products that torch counts
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(TOKENS)[None])
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "model_type", ["qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "glm4", "gpt_oss", "gemma4_text"]
)
def test_as_many_as_torch_counts(model_type: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, model_type, **CHANGES.get(model_type, {}))
    flops = flops_of(read_architecture(folder))
    squares = TOKENS**2 * flops.per_pair
    ours = TOKENS * (flops.per_token + flops.per_output) + squares
    # Rope's outer product of positions and frequencies is a matrix product to torch.
    assert ours == pytest.approx(counted_by_torch(folder), rel=0.01)
    causal = flops.forward([(TOKENS, TOKENS)])
    assert causal == ours - squares + TOKENS * (TOKENS + 1) / 2 * flops.per_pair


def test_linear_attention_costs_its_matrices_and_its_state(tmp_path: Path) -> None:
    model = hf_model(hf_folder(tmp_path, "qwen3_5_text", **CHANGES["qwen3_5_text"]))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(TOKENS)[None])
    architecture = read_architecture(tmp_path)
    flops, linear = flops_of(architecture), architecture.linear
    # For each head and token: k S, k^T v, q S; then the convolution. torch counts no elementwise products.
    state = 3 * 2 * linear.value_heads * linear.key_size * linear.value_size
    convolution = 2 * (2 * linear.key_heads * linear.key_size + linear.value_heads * linear.value_size) * linear.kernel
    ours = TOKENS * (flops.per_token + flops.per_output - 2 * (state + convolution))
    assert ours == counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert flops.per_pair == 2 * 2 * 2 * architecture.num_heads * architecture.head_size, "of two layers"


def test_values_take_one_number_per_token(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, "qwen2")
    architecture = read_architecture(folder, "value")
    assert flops_of(architecture).per_output == 2 * architecture.hidden_size


def test_frozen_matrices_cost_no_gradient_of_their_own(tmp_path: Path) -> None:
    """Forward pass, gradient of the input, and of the matrix where it is trained: of the MLP's three alone."""
    architecture = read_architecture(hf_folder(tmp_path, "qwen2"))
    hidden, kv = architecture.hidden_size, architecture.num_kv_heads * architecture.head_size
    attention, mlp = 2 * hidden * (hidden + kv), 3 * hidden * architecture.ffn_size
    training = flops_of(architecture.with_frozen(("attention",))).training
    assert training == pytest.approx(2 + mlp / (attention + mlp)) and flops_of(architecture).training == TRAINING


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "vocabulary", "batch", "gpus", "seconds", "mfu"),
    [
        (6144, 48, 64, 51200, 4, 8, 1.10, 0.415),
        (12288, 96, 96, 51200, 64, 64, 13.75, 0.514),
        (20480, 105, 128, 51200, 280, 280, 37.83, 0.560),
        (25600, 128, 160, 51200, 512, 512, 71.49, 0.563),
    ],
)
def test_published_mfu(
    hidden: int,
    layers: int,
    heads: int,
    vocabulary: int,
    batch: int,
    gpus: int,
    seconds: float,
    mfu: float,
) -> None:
    """Korthikanti et al. 2022, tables 3 and 5: 22, 175, 530 and 1,000 billion parameters on A100, 2,048 tokens a row.
    Their MLP of two matrices 4 x hidden wide is ours of three, 8/3 x hidden wide."""
    sizes = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": round(8 * hidden / 3),
        "max_position_embeddings": 2048,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
    }
    flops = flops_of(parse(sizes, Path("config.json")))
    work = TRAINING * flops.forward([(2048, 2048)] * batch)
    assert work / (seconds * gpus * 312e12) == pytest.approx(mfu, rel=0.1)
