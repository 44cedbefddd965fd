"""Every key of a config.json is computed, known to change nothing, or refused by its name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from published_configs import GPT_OSS_20B, LLAMA_2, LLAMA_3_ROPE, MISTRAL, QWEN_3, QWEN_15_MOE
from tiny_shapes import CHANGES, SHAPE, architecture_of
from transformers import AutoConfig
from written_keys import WRITTEN

from megappo.architecture.architecture import Architecture
from megappo.architecture.parsing import read_architecture
from megappo.config.config_error import ConfigError


@pytest.fixture
def parsed(tmp_path: Path) -> Any:
    def parsed(config: dict[str, Any]) -> Architecture:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_architecture(tmp_path)

    return parsed


@pytest.mark.parametrize("keys", WRITTEN.values(), ids=WRITTEN)
def test_what_frameworks_write_besides_changes_nothing(parsed: Any, keys: dict[str, Any]) -> None:
    assert parsed(LLAMA_2 | keys).hidden_size == 4096


def test_experts_in_mxfp4_are_taken(parsed: Any) -> None:
    quantized = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    assert "quantization_config" not in parsed(GPT_OSS_20B | quantized).hf_config()


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", *CHANGES])
def test_all_that_transformers_itself_writes_is_taken(parsed: Any, tmp_path: Path, model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **SHAPE | CHANGES.get(model_type, {}))
    for whole in (config.to_dict(), json.loads(config.to_json_string())):
        parsed(whole | {"architectures": [architecture_of(model_type)]})


COMPUTED_ELSEWHERE = [
    *({key: 30.0} for key in ("final_logit_softcapping", "attn_logit_softcapping", "logit_softcap", "router_z_clip")),
    *({key: 0.22} for key in ("residual_multiplier", "embedding_multiplier", "logits_scaling", "attention_multiplier")),
    *({key: 12} for key in ("scale_emb", "scale_depth", "dim_model_base", "query_pre_attn_scalar", "key_multiplier")),
    *({key: 0.5} for key in ("partial_rotary_factor", "rotary_pct", "logit_scale", "mup_width_multiplier")),
    *({key: True} for key in ("qk_layernorm", "use_qk_norm", "qkv_bias", "use_bias", "alibi", "use_parallel_residual")),
    *({key: True} for key in ("attention_out_bias", "use_mrope", "rope_interleaved", "attn_temperature_tuning")),
    *(
        {key: 4}
        for key in ("no_rope_layer_interval", "sliding_window_pattern", "attention_chunk_size", "cla_share_factor")
    ),
    {"clip_qkv": 8.0},
    {"rotary_dim": 64},
    {"is_causal": False},
    {"no_rope_layers": [1, 1, 1, 0]},
    {"dual_chunk_attention_config": {"chunk_size": 262144}},
    {"per_layer_config": {"0": {"intermediate_size": 64}}},
    {"hidden_activation": "gelu_pytorch_tanh"},
    {"norm_type": "layernorm"},
    {"position_embedding_type": "alibi"},
    {"hybrid_override_pattern": "M-M*"},
    {"transformers_weights": "other.safetensors"},
    {"model_type": "granite"},
    {"model_type": "smollm3"},
    {"model_type": "olmo3"},
    {"num_local_experts": 8},
    {"kv_lora_rank": 512},
    {"layer_norm_eps": 1e-5},
]


@pytest.mark.parametrize("keys", COMPUTED_ELSEWHERE, ids=lambda keys: next(iter(keys)))
def test_what_other_models_compute_is_refused_by_name(parsed: Any, keys: dict[str, Any]) -> None:
    ((key, value),) = keys.items()
    with pytest.raises(ConfigError, match=re.escape(f"has {key} = {value!r}, which is not supported: choose an")):
        parsed(LLAMA_2 | keys)


OFF = {
    **dict.fromkeys(("final_logit_softcapping", "clip_qkv", "partial_rotary_factor", "num_local_experts"), None),
    **dict.fromkeys(("qk_layernorm", "qkv_bias", "alibi", "use_mrope", "is_decoder", "use_parallel_residual"), False),
    **dict.fromkeys(("attn_logit_softcapping", "attention_chunk_size"), 0),
    **dict.fromkeys(
        ("residual_multiplier", "embedding_multiplier", "logits_scaling", "rotary_pct", "logit_scale"), 1.0
    ),
    "dual_chunk_attention_config": {},
    "no_rope_layers": [],
    "hidden_activation": "",
    "is_causal": True,
}


def test_values_that_stand_for_off_pass(parsed: Any) -> None:
    assert parsed(LLAMA_2 | OFF).hidden_size == 4096


TWICE = [
    (
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        "rope_theta (500000.0, 10000.0)",
    ),
    ({"rope_parameters": LLAMA_3_ROPE, "rope_scaling": LLAMA_3_ROPE | {"factor": 32.0}}, "factor (8.0, 32.0)"),
    ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": LLAMA_3_ROPE}, "rope_type (default, llama3)"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": LLAMA_3_ROPE},
        "rope_type (llama3, linear)",
    ),
    (
        {"rope_scaling": LLAMA_3_ROPE, "original_max_position_embeddings": 4096},
        "original_max_position_embeddings (4096, 8192)",
    ),
]


@pytest.mark.parametrize(("keys", "values"), TWICE, ids=range(len(TWICE)))
def test_two_values_of_the_rope_are_refused(parsed: Any, keys: dict[str, Any], values: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"config.json: several values of {values}: correct it")):
        parsed(LLAMA_2 | keys)


@pytest.mark.parametrize(
    "rope",
    [
        {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_type": "default", "mrope_section": [16, 24, 24]},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
)
def test_numbers_of_a_rope_that_nobody_reads_are_refused(parsed: Any, rope: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"config.json: rope .* is not supported; supported are"):
        parsed(LLAMA_2 | {"rope_parameters": rope})


def test_the_table_of_a_family_lists_what_it_computes(parsed: Any) -> None:
    parsed(QWEN_3 | {"use_qk_norm": True})
    parsed(QWEN_15_MOE | {"qkv_bias": True})
    assert parsed(MISTRAL | {"sliding_window": 4096}).sliding_window == 4096
    assert parsed(LLAMA_2 | {"sliding_window": 4096}).sliding_window == 4096
    for config, key in ((QWEN_15_MOE, "qkv_bias"), (QWEN_3, "use_qk_norm")):
        with pytest.raises(ConfigError, match=f"has {key} = False, which is not supported"):
            parsed(config | {key: False})
    with pytest.raises(ConfigError, match="has shared_expert_intermediate_size = 0, which is not supported"):
        parsed(QWEN_15_MOE | {"shared_expert_intermediate_size": 0})
