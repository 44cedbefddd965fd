"""The model families this version trains, by the first of `architectures` in config.json."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """In what a dense decoder differs from Llama.

    Attributes:
        sliding_window: the window of config.json, if it has one, is on; else only `use_sliding_window` switches it on.
    """

    qkv_bias: bool = False
    qk_layernorm: bool = False
    sliding_window: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(sliding_window=True),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_layernorm=True),
}


def sliding_window(hf_config: dict[str, Any]) -> int | None:
    """Tokens that some layer attends to at most; None where nothing limits them. `hf_config` is of one of FAMILIES."""
    is_on = FAMILIES[hf_config["architectures"][0]].sliding_window or hf_config.get("use_sliding_window")
    return hf_config.get("sliding_window") or None if is_on else None
