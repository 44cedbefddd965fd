"""The model families this version trains, by the first of `architectures` in config.json."""

from dataclasses import dataclass

REWARD_MODELS = ("ForTokenClassification", "ForSequenceClassification")


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


def language_model(architecture: str) -> str:
    """The architecture with a language model's head: a critic's, or a reward model's, differs in its head alone."""
    for ending in REWARD_MODELS:
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + "ForCausalLM"
    return architecture
