"""config.json parsed: unsupported keys are refused by name, before any rank starts."""

from pathlib import Path
from typing import Any

import pytest
from tiny_shapes import GEMMA4, GPT_OSS, OLMO3, QWEN2, QWEN3_MOE, SHAPE, V2, V3, YARN

from megappo.architecture.architecture import Architecture
from megappo.architecture.parsing import parse

YARN_ALONE = OLMO3["rope_parameters"]["full_attention"]
OLMO3_SCALED_TWICE = {
    **{"architectures": ["Olmo3ForCausalLM"], "sliding_window": 4},
    "rope_parameters": {"full_attention": YARN_ALONE, "sliding_attention": YARN_ALONE},
}


def _parsed(**changes: Any) -> Architecture:
    return parse(QWEN2 | changes, Path("model/config.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [0]}, "mlp_only_layers = .*not supported"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2.*not supported"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok = 1.*not supported"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1.*not supported"),
    ],
)
def test_unsupported_mixtures_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _parsed(**QWEN3_MOE | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (V3 | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .*fp8.*not supported"),
        (V3 | {"rope_interleave": False}, "rope_interleave = False.*not supported"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq = 2.*not supported"),
        (V3 | {"n_shared_experts": 0}, "n_shared_experts = 0.*not supported"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func = 'softmax'.*not supported"),
        (V3 | {"topk_method": "greedy"}, "topk_method = 'greedy'.*not supported"),
        (V3 | {"norm_topk_prob": False}, "norm_topk_prob = False.*not supported"),
        (V3 | {"num_experts_per_tok": 6}, "topk_group = 2.*not supported"),
        (V2 | {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'.*not supported"),
        (V2 | {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'.*not supported"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob = True.*not supported"),
        (V2 | {"topk_method": "group_limited_greedy"}, "topk_group = 2.*not supported"),
        (V3 | {"rope_parameters": YARN | {"rope_type": "linear"}}, "'linear'.*not supported; supported.*yarn"),
        (V3 | {"rope_parameters": YARN | {"factor": None}}, "not supported; supported.*yarn .factor, original"),
        (V3 | {"rope_parameters": YARN | {"mscale": None}}, "both or neither of mscale and mscale_all_dim"),
        (V3 | {"rope_parameters": YARN | {"attention_factor": 1.5}}, "yarn needs attention_factor"),
        (V3 | {"rope_parameters": YARN | {"truncate": False}}, "truncate true .or false without latent attention"),
        (QWEN2 | {"rope_parameters": GPT_OSS["rope_parameters"] | {"truncate": "no"}}, "truncate true .or false"),
        (QWEN2 | {"rope_parameters": YARN_ALONE | {"attention_factor": 1.2}}, "attention_factor 1.13863 or none"),
        (OLMO3_SCALED_TWICE, "rope .*'yarn'.* is not supported; supported are, over the whole head, default: choose"),
    ],
)
def test_unsupported_latent_models_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _parsed(**changes)


GEMMA4 = SHAPE | GEMMA4 | {"architectures": ["Gemma4ForCausalLM"], "rms_norm_eps": 1e-6}
LARGER, OF_HEADS = {"head_dim": 24, "num_key_value_heads": 2}, {"head_dim": 8}
WINDOWS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input = 256.*: its layers have embeddings of"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2.*: its layers share keys and values with earlier"),
        ({"enable_moe_block": True}, "enable_moe_block = True.*: its layers have experts beside an MLP: choose a size"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'.*not supported"),
        ({"per_layer_config": {"1": LARGER}}, "per_layer_config = .*not supported"),
        ({"per_layer_config": {"0": OF_HEADS, "1": LARGER, "3": LARGER}}, "per_layer_config = .*not supported"),
        ({"per_layer_config": {"1": {"sliding_window": 8}, "3": {"sliding_window": 8}}}, "per_layer_config = .*not"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads 3 does not divide num_attention_heads 4"),
        ({"layer_types": WINDOWS}, "layer_types = .*not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "supported are, .*proportional"),
    ],
)
def test_other_layers_of_gemma_4_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _parsed(**GEMMA4 | changes)


def test_a_key_with_a_default_that_is_not_supported_must_be_there() -> None:
    given = {key: value for key, value in GEMMA4.items() if key != "hidden_size_per_layer_input"}
    with pytest.raises(ValueError, match="lacks hidden_size_per_layer_input"):
        parse(given, Path("model/config.json"))
    assert parse(given | {"hidden_size_per_layer_input": None}, Path("model/config.json")).logit_cap == 3.0


def test_unsupported_architecture_is_named_with_what_is_supported() -> None:
    with pytest.raises(
        ValueError,
        match="model/config.json is of architecture OPTForCausalLM; this version trains .*MistralForCausalLM",
    ):
        _parsed(architectures=["OPTForCausalLM"])


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"layer_types": ["sliding_attention"]},
    ],
)
def test_unsupported_features_are_named(changes: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(changes))} = .*not supported"):
        _parsed(**changes)
