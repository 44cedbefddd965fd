"""The model families this version trains, by the first of `architectures` in config.json."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """In what a dense decoder differs from Llama."""

    qkv_bias: bool = False
    qk_layernorm: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_layernorm=True),
}
