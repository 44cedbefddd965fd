"""Models and layouts that cannot be built are refused by name, before any rank starts."""

from typing import Any

import pytest
from tiny_deepseek import LATENT, YARN

from megappo.config.schema import Model, Parallel
from megappo.models.hf_config import transformer_config

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 6,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "rms_norm_eps": 1e-6,
}


def _config(parallel: Parallel | None = None, **changes: Any) -> Any:
    return transformer_config(QWEN2 | changes, Model(path="m", dtype="fp32"), parallel or Parallel(), "none")


def test_supported_model_is_described() -> None:
    config = _config(Parallel(tensor=3, pipeline=2, sequence=True))
    assert (config.num_layers, config.kv_channels, config.num_query_groups) == (6, 4, 6)
    assert config.add_qkv_bias and not config.add_bias_linear and not config.qk_layernorm


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize("renormalizes", [True, False])
def test_router_is_the_familys(renormalizes: bool) -> None:
    parallel = Parallel(tensor=2, expert=3, expert_tensor=2, sequence=True)
    config = _config(parallel, **QWEN3_MOE, norm_topk_prob=renormalizes)
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (6, 2, 16)
    assert config.moe_router_pre_softmax != renormalizes
    assert config.moe_router_load_balancing_type == "none" and config.moe_shared_expert_intermediate_size is None
    assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (3, 2)


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
        _config(**QWEN3_MOE | changes)


DEEPSEEK = LATENT | {"num_attention_heads": 4, "num_hidden_layers": 4}
V2, V3 = (DEEPSEEK | {"architectures": [f"Deepseek{version}ForCausalLM"]} for version in ("V2", "V3"))


def test_latent_attention_is_described() -> None:
    config = _config(Parallel(tensor=4, sequence=True), **V3)
    assert (config.q_lora_rank, config.kv_lora_rank, config.qk_head_dim, config.v_head_dim) == (20, 12, 10, 14)
    assert config.moe_layer_freq == [0, 1, 1, 1] and config.moe_shared_expert_intermediate_size == 48
    assert config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate == 0
    assert (config.moe_router_num_groups, config.moe_router_group_topk) == (4, 2)
    assert _config(**V3 | {"topk_group": 4}).moe_router_group_topk is None, "no group is out of reach"


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
        (V3 | {"rope_parameters": YARN | {"truncate": False}}, "nor truncate = false"),
    ],
)
def test_unsupported_latent_models_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(**changes)


def test_layouts_of_experts_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="num_experts = 6 does not divide by parallel.expert = 4"):
        _config(Parallel(expert=4), **QWEN3_MOE)
    with pytest.raises(ValueError, match="parallel.tensor > 1 needs parallel.sequence = true"):
        _config(Parallel(tensor=2), **QWEN3_MOE)
    with pytest.raises(ValueError, match="parallel.expert = 2, but Qwen2ForCausalLM has no experts"):
        _config(Parallel(expert=2))
    with pytest.raises(ValueError, match="moe_intermediate_size = 16 does not divide by parallel.expert_tensor = 3"):
        _config(Parallel(expert_tensor=3), **QWEN3_MOE)
    with pytest.raises(ValueError, match="parallel.expert_tensor = 2, but Qwen2ForCausalLM has no experts"):
        _config(Parallel(expert_tensor=2))


def test_stages_may_differ_and_windows_be_longer_than_any_row() -> None:
    config = _config(Parallel(pipeline=2, pipeline_split=(2, 4)), num_hidden_layers=6)
    assert [config.pipeline_model_parallel_layout.get_num_layers_to_build(pp_rank=stage) for stage in (0, 1)] == [2, 4]
    config = _config(Parallel(pipeline=2, virtual_pipeline=2, pipeline_split=(1, 3, 1, 1)), num_hidden_layers=6)
    layout = config.pipeline_model_parallel_layout.layout
    decoders = [[sum(module.name == "decoder" for module in chunk) for chunk in stage] for stage in layout]
    assert decoders == [[1, 1], [3, 1]], "the first stage has the first and the third chunk"
    _config(use_sliding_window=True, sliding_window=16, layer_types=["sliding_attention", "full_attention"])


def test_unsupported_architecture_is_named_with_what_is_supported() -> None:
    with pytest.raises(ValueError, match="OPTForCausalLM.*not supported.*MistralForCausalLM"):
        _config(architectures=["OPTForCausalLM"])


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
        _config(**changes)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallel(pipeline=4), "num_hidden_layers = 6 does not divide by parallel.pipeline = 4, and no .*split"),
        (
            Parallel(pipeline=2, pipeline_split=(3, 4)),
            r"split = \[3, 4\] is not num_hidden_layers = 6 in .* = 2 parts",
        ),
        (Parallel(pipeline=2, pipeline_split=(6,)), r"split = \[6\] is not num_hidden_layers = 6 in .* = 2 parts"),
        (Parallel(pipeline=2, virtual_pipeline=2), "num_hidden_layers = 6 does not divide by .*virtual_pipeline = 4"),
        (Parallel(virtual_pipeline=2), "virtual_pipeline = 2 needs parallel.pipeline > 1"),
        (Parallel(tensor=8), "num_attention_heads = 12 does not divide by parallel.tensor = 8"),
        (Parallel(tensor=4), "num_key_value_heads = 6 does not divide by parallel.tensor = 4"),
        (Parallel(sequence=True), "parallel.sequence needs parallel.tensor > 1"),
    ],
)
def test_layouts_that_do_not_divide_are_named(parallel: Parallel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(parallel)


def test_an_inner_size_that_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match="intermediate_size = 47 does not divide by parallel.tensor = 2"):
        _config(Parallel(tensor=2), intermediate_size=47)
