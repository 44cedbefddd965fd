"""config.json parsed: unsupported keys are refused by name, before any rank starts."""

from pathlib import Path
from typing import Any

import pytest
from tiny_shapes import GPT_OSS, OLMO3, QWEN2, QWEN3_MOE, V2, V3, YARN

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
        (V3 | {"rope_parameters": YARN | {"mscale": None}}, "nor one of mscale and mscale_all_dim without the other"),
        (V3 | {"rope_parameters": YARN | {"attention_factor": 1.5}}, "of yarn neither attention_factor"),
        (V3 | {"rope_parameters": YARN | {"truncate": False}}, "nor truncate = false of latent attention"),
        (QWEN2 | {"rope_parameters": GPT_OSS["rope_parameters"] | {"truncate": "no"}}, "nor truncate = false"),
        (QWEN2 | {"rope_parameters": YARN_ALONE | {"attention_factor": 1.2}}, "attention_factor other than 1.13863"),
        (OLMO3_SCALED_TWICE, "rope .*'yarn'.* is not supported; supported are, over the whole head, default: choose"),
    ],
)
def test_unsupported_latent_models_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _parsed(**changes)


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
