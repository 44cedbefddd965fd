"""The tables against Hugging Face's own tensor names and shapes, and against the names of both layer specs."""

import pytest
from tiny_folders import SHAPE
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.architecture.families import HeadKind
from megappo.architecture.parameters import compositions, hf_shapes


def config(model_type: str, **changes: object) -> dict:
    return AutoConfig.for_model(model_type, **SHAPE | changes).to_dict() | {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"]
    }


def table(hf_config: dict, tensor: int = 1, head: HeadKind = "policy") -> dict:
    return compositions(hf_config, tensor=tensor, padded_vocab_size=92, head=head)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["qwen2", "llama", "qwen3", "mistral"])
def test_names_and_shapes_are_hugging_faces(model_type: str, tied: bool) -> None:
    hf_config = config(model_type, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE, tie_word_embeddings=tied))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert hf_shapes(hf_config) == expected


def test_names_and_shapes_of_experts_are_those_of_the_hub() -> None:
    sizes = {"num_local_experts": 3, "num_key_value_heads": 4, "head_dim": None}
    shapes = hf_shapes(config("mixtral", **sizes))
    for layer in range(SHAPE["num_hidden_layers"]):
        moe = f"model.layers.{layer}.block_sparse_moe."
        found = {name.removeprefix(moe): shape for name, shape in shapes.items() if name.startswith(moe)}
        expected = {"gate.weight": (3, 32)}
        for expert in range(3):
            for name, shape in (("w1", (48, 32)), ("w2", (32, 48)), ("w3", (48, 32))):
                expected[f"experts.{expert}.{name}.weight"] = shape
        assert found == expected
    assert not any(".mlp." in name for name in shapes)


def test_transformer_engines_fused_norms_have_the_same_pieces() -> None:
    of = table(config("qwen2"))
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"decoder.layers.{layer}."
        assert of[f"{prefix}self_attention.linear_qkv.layer_norm_weight"] == of[f"{prefix}input_layernorm.weight"]
        assert of[f"{prefix}mlp.linear_fc1.layer_norm_weight"] == of[f"{prefix}pre_mlp_layernorm.weight"]


def test_shards_of_tensor_parallelism() -> None:
    of = table(config("qwen2"), tensor=2)
    layer = "decoder.layers.3."
    assert of["embedding.word_embeddings.weight"].shard_shape == (46, 32)
    assert of[f"{layer}self_attention.linear_qkv.weight"].shard_shape == ((4 + 2 + 2) * 16 // 2, 32)
    assert of[f"{layer}self_attention.linear_qkv.weight"].groups == 1
    assert of[f"{layer}self_attention.linear_qkv.bias"].shard_shape == (64,)
    assert of[f"{layer}self_attention.linear_proj.weight"].shard_shape == (32, 32)
    assert of[f"{layer}mlp.linear_fc1.weight"].shard_shape == (48, 32)
    assert of[f"{layer}mlp.linear_fc2.weight"].shard_shape == (32, 24)


def test_shards_of_experts() -> None:
    hf_config = config("mixtral", num_local_experts=3)
    of = compositions(hf_config, tensor=1, expert_tensor=2, padded_vocab_size=92, head="policy")
    expert = "decoder.layers.1.mlp.experts.local_experts.2."
    assert of[f"{expert}linear_fc1.weight"].shard_shape == (48, 32)
    assert of[f"{expert}linear_fc2.weight"].shard_shape == (32, 24)
    assert of["decoder.layers.1.self_attention.linear_proj.weight"].shard_shape == (32, 64)


def test_what_cannot_be_named_is_refused() -> None:
    with pytest.raises(ValueError, match="OPTForCausalLM.*Qwen2ForCausalLM"):
        table({"architectures": ["OPTForCausalLM"]})
