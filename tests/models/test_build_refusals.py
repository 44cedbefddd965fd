"""Models and layouts that cannot be built are refused by name, before any rank starts."""

from typing import Any

import pytest

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


def test_stages_may_differ_and_windows_be_longer_than_any_row() -> None:
    config = _config(Parallel(pipeline=2, pipeline_split=(2, 4)), num_hidden_layers=6)
    assert [config.pipeline_model_parallel_layout.get_num_layers_to_build(pp_rank=stage) for stage in (0, 1)] == [2, 4]
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
            r"split = \[3, 4\] is not num_hidden_layers = 6 on .*2 stages",
        ),
        (Parallel(pipeline=2, pipeline_split=(6,)), r"split = \[6\] is not num_hidden_layers = 6 on .* = 2 stages"),
        (Parallel(tensor=8), "num_attention_heads = 12 does not divide by parallel.tensor = 8"),
        (Parallel(tensor=4), "num_key_value_heads = 6 does not divide by parallel.tensor = 4"),
        (Parallel(sequence=True), "parallel.sequence needs parallel.tensor > 1"),
    ],
)
def test_layouts_that_do_not_divide_are_named(parallel: Parallel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _config(parallel)
