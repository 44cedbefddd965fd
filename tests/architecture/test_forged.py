"""Odd values in config.json: read as transformers and SGLang read them, or refused by the key's name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_shapes import CHANGES, SHAPE, architecture_of
from transformers import AutoConfig

from megappo.architecture.architecture import Architecture
from megappo.architecture.families import ORIGINAL
from megappo.architecture.parsing import read_architecture
from megappo.config.config_error import ConfigError

ABSENT = object()


def written(model_type: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers writes it, with other values; a key with dots is in a section."""
    config = AutoConfig.for_model(model_type, **SHAPE | CHANGES.get(model_type, {}))
    found = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture_of(model_type)]}
    for dotted, value in changes.items():
        *sections, key = dotted.split(".")
        section = found
        for name in sections:
            section = section.setdefault(name, {})
        section.pop(key, None)
        section |= {} if value is ABSENT else {key: value}
    return json.loads(json.dumps(found))  # transformers changes what it is given


def parsed(folder: Path, config: dict[str, Any]) -> Architecture:
    (folder / "config.json").write_text(json.dumps(config))
    return read_architecture(folder)


UNSUPPORTED = "has {} = {}, which is not supported"
ABOVE_0 = "{}: expected a number greater than 0, found {}"
REFUSED = [
    ("gemma4_text", "rope_parameters.full_attention.factor", 2.0, "rope {{'rope_type': 'proportional'"),
    ("gemma4_text", "layer_types", ABSENT, "lacks layer_types"),
    ("gemma3_text", "sliding_window", None, "sliding_window is not set, but layers have sliding_attention"),
    *(("deepseek_v3", key, None, UNSUPPORTED) for key in ("rope_interleave", "norm_topk_prob", "scoring_func")),
    *(("qwen3_next", "attn_output_gate", value, UNSUPPORTED) for value in (False, None)),
    *(("deepseek_v3", "rope_parameters.apply_yarn_scaling", value, "rope {{'rope_type'") for value in (False, None)),
    *(("phi3", f"rope_parameters.{key}", 1.0, "rope {{'rope_type'") for key in ("short_mscale", "long_mscale")),
    ("gpt_oss", "rope_parameters.truncate", None, "rope {{'rope_type'"),
    ("llama", "is_causal", None, UNSUPPORTED),
    ("llama", "rope_is_neox_style", None, UNSUPPORTED),
    ("glm4", "partial_rotary_factor", None, UNSUPPORTED),
    ("gpt_oss", "hidden_act_alpha", 0, UNSUPPORTED),
    ("deepseek_v3", "swiglu_limit", 0, UNSUPPORTED),
    ("deepseek_v3", "head_dim", 2, "head_dim 2 is another number than qk_rope_head_dim 8"),
    ("phi3", ORIGINAL, ABSENT, f"several values of {ORIGINAL} (4096, 32)"),
    *(("deepseek_v3", "routed_scaling_factor", value, ABOVE_0) for value in (0, -1.0)),
    *(("deepseek_v3", f"rope_parameters.{key}", 0, ABOVE_0) for key in ("beta_fast", "beta_slow", "factor")),
    *(("olmo3", f"rope_parameters.full_attention.{key}", -1, ABOVE_0) for key in ("factor", ORIGINAL)),
    *(("mistral", "sliding_window", value, "sliding_window: Input should be greater than or eq") for value in (0, -1)),
    ("gemma3_text", "sliding_window", -1, "sliding_window: Input should be greater than or equal to 1, found -1"),
    ("smollm3", "num_hidden_layers", 10**12, "num_hidden_layers: Input should be less than or equal to 10000"),
    ("deepseek_v3", "first_k_dense_replace", -1, "num_dense_layers: Input should be greater than or equal to 0"),
]


@pytest.mark.parametrize(("model_type", "key", "value", "message"), REFUSED)
def test_values_that_libraries_read_otherwise_are_refused(
    model_type: str, key: str, value: object, message: str, tmp_path: Path
) -> None:
    parsed(tmp_path, written(model_type, {}))
    expected = message.format(key.rpartition(".")[2], repr(value))
    with pytest.raises(ConfigError, match=f"config.json.*{re.escape(expected)}"):
        parsed(tmp_path, written(model_type, {key: value}))


@pytest.mark.parametrize("value", [ABSENT, None])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral", "phi3"])
def test_a_window_that_is_absent_has_the_default_of_transformers(
    model_type: str, value: object, tmp_path: Path
) -> None:
    config = written(model_type, {"sliding_window": value})
    expected = getattr(AutoConfig.for_model(**config), "sliding_window", None)
    assert parsed(tmp_path, config).sliding_window == expected
    assert expected == (4096 if (model_type, value) == ("mistral", ABSENT) else None)


def test_windows_of_some_layers_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    for model_type in ("gemma3_text", "gemma4_text", "olmo3", "gpt_oss"):
        config = written(model_type, {"sliding_window": ABSENT})
        assert parsed(tmp_path, config).sliding_window == AutoConfig.for_model(**config).sliding_window


@pytest.mark.parametrize("rope", [ABSENT, None, {}])
def test_gpt_oss_without_rotary_positions_has_the_yarn_of_transformers(rope: object, tmp_path: Path) -> None:
    config = written("gpt_oss", {"rope_parameters": rope})
    expected = AutoConfig.for_model(**config).rope_parameters
    found = parsed(tmp_path, config).rope
    assert (found.kind, found.base) == (expected["rope_type"], expected["rope_theta"])
    assert found.kind == ("default" if rope == {} else "yarn")
    assert found.numbers.items() >= {key: expected[key] for key in ("factor", "beta_fast") if key in expected}.items()


def test_off_by_its_own_value_is_accepted(tmp_path: Path) -> None:
    parsed(tmp_path, written("phi3", {"rope_parameters.short_mscale": None}))
    parsed(tmp_path, written("deepseek_v3", {"rope_parameters.apply_yarn_scaling": True, "swiglu_limit": None}))
    assert parsed(tmp_path, written("glm4", {"attention_bias": ABSENT})).qkv_bias
