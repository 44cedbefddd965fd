"""Models that SGLang cannot serve, by their config.json."""

import json
from pathlib import Path

import pytest
from published_configs import OLMO_3, QWEN_3_NEXT
from tiny_shapes import QWEN2, V2

from megappo.architecture.fit import engine_fit_errors
from megappo.architecture.parsing import parse

LINEAR, FULL = "linear_attention", "full_attention"
LAYERS = 12 * [LINEAR, LINEAR, LINEAR, FULL]


def errors(config: dict) -> list[str]:
    return list(engine_fit_errors(parse(config, Path("model/config.json")), 2))


def test_a_pattern_of_linear_attention_is_in_the_key_that_sglang_reads() -> None:
    assert errors(QWEN_3_NEXT) == [] == errors(QWEN_3_NEXT | {"layer_types": LAYERS})


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (LAYERS, 'layer_types, of which SGLang reads nothing: add "full_attention_interval": 4 to it'),
        ([FULL, *LAYERS[1:]], "layer_types is not a regular pattern, and SGLang serves only"),
    ],
)
def test_other_patterns_are_refused(layers: list[str], message: str) -> None:
    """transformers writes `layer_types` alone."""
    config = {key: value for key, value in QWEN_3_NEXT.items() if key != "full_attention_interval"}
    (error,) = errors(config | {"layer_types": layers})
    assert error.startswith("model/config.json") and message in error


def test_a_greedy_router_has_no_groups_for_sglang_to_choose_from() -> None:
    greedy = QWEN2 | V2 | {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
    (error,) = errors(greedy | {"n_group": 4, "topk_group": 2})
    assert error.endswith("choose experts from topk_group of n_group groups only: set both to 1")
    assert errors(greedy | {"n_group": 1, "topk_group": 1}) == [] == errors(greedy | {"topk_group": 4})


def test_olmo3_has_the_keys_that_sglang_reads() -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    nested = {key: value for key, value in OLMO_3.items() if key not in ("rope_theta", "rope_scaling")}
    nested["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}
    (error,) = errors(nested)
    assert error.endswith(f'add "rope_theta": 500000.0, "rope_scaling": {json.dumps(rope)} to it')
    assert errors(OLMO_3) == [] == errors(nested | {"rope_theta": 500000.0, "rope_scaling": rope})
    (error,) = errors(OLMO_3 | {"rope_theta": 1e6})
    assert "SGLang reads one rope_theta for all layers, but sliding_attention has another" in error
