"""The tables against Hugging Face's own tensor names and shapes, and against the names of both layer specs."""

from pathlib import Path

import pytest
from tiny_folders import SHAPE
from tiny_shapes import DEEPSEEK_V3, MIXTURES
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.architecture.architecture import Architecture
from megappo.architecture.parameters import Parameter, by_name, hf_shapes, is_trained, list_parameters, stage_sizes
from megappo.architecture.parsing import parse
from megappo.config.sections import Parallel


def architecture(model_type: str, **changes: object) -> Architecture:
    written = AutoConfig.for_model(model_type, **SHAPE | changes).to_dict()
    return parse(written | {"architectures": [f"{model_type.capitalize()}ForCausalLM"]}, Path("config.json"))


def table(model_type: str, tensor: int = 1, expert_tensor: int = 1, **changes: object) -> dict[str, Parameter]:
    return by_name(list_parameters(architecture(model_type, **changes), tensor=tensor, expert_tensor=expert_tensor))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["qwen2", "llama", "qwen3", "mistral"])
def test_names_and_shapes_are_hugging_faces(model_type: str, tied: bool) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE, tie_word_embeddings=tied))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert hf_shapes(architecture(model_type, tie_word_embeddings=tied)) == expected


@pytest.mark.parametrize("model_type", ["qwen2", "deepseek_v3"])
def test_as_many_parameters_as_hugging_face_counts(model_type: str) -> None:
    changes = DEEPSEEK_V3 | {"head_dim": 8} if model_type == "deepseek_v3" else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE | changes))
    name = type(model).__name__
    parsed = parse({**model.config.to_dict(), "architectures": [name]}, Path("config.json"))
    assert [sum(size) for size in stage_sizes(parsed, Parallel())] == [model.num_parameters()]


def test_names_and_shapes_of_experts_are_those_of_the_hub() -> None:
    sizes = {"num_local_experts": 3, "num_key_value_heads": 4, "head_dim": None}
    shapes = hf_shapes(architecture("mixtral", **sizes))
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
    of = table("qwen2")
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"decoder.layers.{layer}."
        assert of[f"{prefix}self_attention.linear_qkv.layer_norm_weight"] == of[f"{prefix}input_layernorm.weight"]
        assert of[f"{prefix}mlp.linear_fc1.layer_norm_weight"] == of[f"{prefix}pre_mlp_layernorm.weight"]


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen2_moe", "deepseek_v3"])
def test_groups_to_freeze_are_hugging_faces_modules_under_either_layer_spec(model_type: str) -> None:
    name = {"qwen2_moe": "Qwen2MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}.get(model_type)
    changes = MIXTURES.get(model_type, {}) | ({"head_dim": 8} if model_type == "deepseek_v3" else {})
    shape = AutoConfig.for_model(model_type, **SHAPE | changes).to_dict()
    named = name or f"{model_type.capitalize()}ForCausalLM"
    whole = parse(shape | {"architectures": [named]}, Path("config.json")).with_head("value")
    modules = {"embedding": ".embed_tokens.", "attention": ".self_attn.", "mlp": ".mlp."}
    for group, module in modules.items():
        frozen = whole.with_frozen((group,))
        for parameter in list_parameters(frozen):
            is_in_group = module in parameter.hf_tensors[0].name
            assert {is_trained(one, frozen) for one in parameter.names} == {not is_in_group}, parameter.names
    assert all(is_trained(one, whole) for parameter in list_parameters(whole) for one in parameter.names)


def test_shards_of_tensor_parallelism() -> None:
    of = table("qwen2", tensor=2)
    layer = "decoder.layers.3."
    assert of["embedding.word_embeddings.weight"].shard_shape == (46, 32)
    assert of[f"{layer}self_attention.linear_qkv.weight"].shard_shape == ((4 + 2 + 2) * 16 // 2, 32)
    assert of[f"{layer}self_attention.linear_qkv.weight"].groups == 1
    assert of[f"{layer}self_attention.linear_qkv.bias"].shard_shape == (64,)
    assert of[f"{layer}self_attention.linear_proj.weight"].shard_shape == (32, 32)
    assert of[f"{layer}mlp.linear_fc1.weight"].shard_shape == (48, 32)
    assert of[f"{layer}mlp.linear_fc2.weight"].shard_shape == (32, 24)


def test_shards_of_experts() -> None:
    of = table("mixtral", expert_tensor=2, num_local_experts=3)
    expert = "decoder.layers.1.mlp.experts.local_experts.2."
    assert of[f"{expert}linear_fc1.weight"].shard_shape == (48, 32)
    assert of[f"{expert}linear_fc2.weight"].shard_shape == (32, 24)
    assert of["decoder.layers.1.self_attention.linear_proj.weight"].shard_shape == (32, 64)


def test_what_cannot_be_named_is_refused() -> None:
    with pytest.raises(ValueError, match="OPTForCausalLM.*Qwen2ForCausalLM"):
        parse({"architectures": ["OPTForCausalLM"]}, Path("config.json"))
