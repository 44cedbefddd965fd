"""Models as Megatron has them described, and layouts that do not fit them refused by name."""

from pathlib import Path
from typing import Any

import pytest
from tiny_shapes import QWEN2, QWEN3_5, QWEN3_MOE, V3

from megappo.architecture.parsing import parse
from megappo.config.config_error import ConfigError
from megappo.config.schema import Model
from megappo.config.sections import Parallel
from megappo.models import megatron_config
from megappo.models.megatron_config import transformer_config


def _config(parallel: Parallel | None = None, **changes: Any) -> Any:
    architecture = parse(QWEN2 | changes, Path("config.json"))
    return transformer_config(architecture, Model(path="m", dtype="fp32"), parallel or Parallel(), "none", frozenset())


def test_supported_model_is_described() -> None:
    config = _config(Parallel(tensor=3, pipeline=2, sequence=True))
    assert (config.num_layers, config.kv_channels, config.num_query_groups) == (6, 4, 6)
    assert config.add_qkv_bias and not config.add_bias_linear and not config.qk_layernorm


@pytest.mark.parametrize("renormalizes", [True, False])
def test_router_is_the_familys(renormalizes: bool) -> None:
    parallel = Parallel(tensor=2, expert=3, expert_tensor=2, sequence=True)
    config = _config(parallel, **QWEN3_MOE, norm_topk_prob=renormalizes)
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (6, 2, 16)
    assert config.moe_router_pre_softmax != renormalizes
    assert config.moe_router_load_balancing_type == "none" and config.moe_shared_expert_intermediate_size is None
    assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (3, 2)


def test_latent_attention_is_described() -> None:
    config = _config(Parallel(tensor=4, sequence=True), **V3)
    assert (config.q_lora_rank, config.kv_lora_rank, config.qk_head_dim, config.v_head_dim) == (20, 12, 10, 14)
    assert config.moe_layer_freq == [0, 1, 1, 1] and config.moe_shared_expert_intermediate_size == 48
    assert config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate == 0
    assert (config.moe_router_num_groups, config.moe_router_group_topk) == (4, 2)
    assert _config(**V3 | {"topk_group": 4}).moe_router_group_topk is None, "no group is out of reach"


def test_stages_may_differ_and_windows_be_longer_than_any_row() -> None:
    config = _config(Parallel(pipeline=2, pipeline_split=(2, 4)), num_hidden_layers=6)
    assert [config.pipeline_model_parallel_layout.get_num_layers_to_build(pp_rank=stage) for stage in (0, 1)] == [2, 4]
    config = _config(Parallel(pipeline=2, virtual_pipeline=2, pipeline_split=(1, 3, 1, 1)), num_hidden_layers=6)
    layout = config.pipeline_model_parallel_layout.layout
    decoders = [[sum(module.name == "decoder" for module in chunk) for chunk in stage] for stage in layout]
    assert decoders == [[1, 1], [3, 1]], "the first stage has the first and the third chunk"
    _config(use_sliding_window=True, sliding_window=16, layer_types=["sliding_attention", "full_attention"])


def test_layouts_that_do_not_fit_are_refused_in_the_words_of_the_plan() -> None:
    with pytest.raises(ConfigError) as caught:
        _config(Parallel(tensor=5, pipeline=4, expert=4), **QWEN3_MOE)
    assert caught.value.errors == (
        "parallel.tensor 5 does not divide num_attention_heads 12 of config.json: 4 or 6 would",
        "parallel.tensor 5 does not divide num_key_value_heads 6 of config.json: 3 or 6 would",
        "parallel.expert 4 does not divide num_experts 6 of config.json: 3 or 6 would",
        "parallel.pipeline 4 x virtual_pipeline 1 = 4 does not divide num_hidden_layers 6 of config.json: 3 or 6 "
        "would, or set parallel.pipeline_split",
        "parallel.sequence must be true with parallel.tensor 5, as config.json is of a mixture of experts",
    )
    with pytest.raises(ConfigError, match="parallel.expert 2: config.json is of a dense model, without experts: set"):
        _config(Parallel(expert=2))
    with pytest.raises(ConfigError, match="parallel.tensor 2 does not divide intermediate_size 47 of config.json"):
        _config(Parallel(tensor=2), intermediate_size=47)


def test_deepep_is_taken_where_it_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, parallel = parse(QWEN2 | QWEN3_MOE, Path("config.json")), Parallel(expert=2, dispatcher="deepep")
    with pytest.raises(
        ConfigError, match="deep_ep cannot be imported \\(ModuleNotFoundError No module named 'deep_ep'"
    ):
        transformer_config(architecture, Model(path="m", dtype="bf16"), parallel, "none", frozenset())
    monkeypatch.setattr(megatron_config, "import_deep_ep", lambda: None)
    with pytest.raises(ConfigError, match="needs bf16, found model.dtype fp32: set model.dtype to bf16, or"):
        _config(parallel, **QWEN3_MOE)
    config = transformer_config(architecture, Model(path="m", dtype="bf16"), parallel, "none", frozenset())
    assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("flex", "deepep")
    assert _config(Parallel(expert=2), **QWEN3_MOE).moe_token_dispatcher_type == "alltoall"


def test_linear_attention_cuts_heads_and_no_rows() -> None:
    model = {"architectures": ["Qwen3_5ForCausalLM"], **QWEN3_5}
    assert _config(Parallel(tensor=2), **model).linear_attention_freq == [1, 0, 1, 0, 1, 0]
    with pytest.raises(ConfigError, match="parallel.context 2: config.json has layers with linear attention"):
        _config(Parallel(context=2), **model)
    with pytest.raises(ConfigError, match="parallel.tensor 3 does not divide linear_num_key_heads 2 of config.json"):
        _config(Parallel(tensor=3), **model)
    with pytest.raises(ConfigError, match="linear_num_key_heads 3 does not divide linear_num_value_heads 4"):
        _config(**model | {"linear_num_key_heads": 3})
    with pytest.raises(ConfigError, match="layer_types has 1 layers, num_hidden_layers is 6"):
        _config(**model, layer_types=["linear_attention"])
