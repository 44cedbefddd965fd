"""The model families this version trains, by the first of `architectures` in config.json."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Experts:
    """How a family's mixture of experts is described and stored; every layer is one.

    Attributes:
        ffn: key of config.json with an expert's inner size.
        block: module that holds router and experts in per-expert checkpoints.
        gate, up, down: an expert's matrices in them.
        renormalizes: the chosen experts' probabilities are divided by their sum; None = `norm_topk_prob` says so.
        shared: besides, every token goes through a shared expert, weighted by a gate of its own.
    """

    ffn: str = "moe_intermediate_size"
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renormalizes: bool | None = None
    shared: bool = False

    def renormalized(self, hf_config: dict[str, Any]) -> bool:
        """Whether the chosen experts' probabilities add up to 1."""
        return bool(hf_config.get("norm_topk_prob", False) if self.renormalizes is None else self.renormalizes)


REWARD_MODELS = ("ForTokenClassification", "ForSequenceClassification")


@dataclass(frozen=True)
class Family:
    """In what a decoder differs from Llama.

    Attributes:
        sliding_window: the window of config.json, if it has one, is on; else only `use_sliding_window` switches it on.
        experts: None for a dense model.
        rope_theta: rotary base where config.json is silent.
    """

    qkv_bias: bool = False
    qk_layernorm: bool = False
    sliding_window: bool = False
    experts: Experts | None = None
    rope_theta: float = 10000.0


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(sliding_window=True),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_layernorm=True),
    "MixtralForCausalLM": Family(
        sliding_window=True,
        experts=Experts("intermediate_size", "block_sparse_moe", "w1", "w3", "w2", renormalizes=True),
        rope_theta=1e6,
    ),
    "Qwen2MoeForCausalLM": Family(qkv_bias=True, experts=Experts(shared=True)),
    "Qwen3MoeForCausalLM": Family(qk_layernorm=True, experts=Experts()),
}


def sliding_window(hf_config: dict[str, Any]) -> int | None:
    """Tokens that some layer attends to at most; None where nothing limits them. `hf_config` is of one of FAMILIES."""
    is_on = FAMILIES[hf_config["architectures"][0]].sliding_window or hf_config.get("use_sliding_window")
    return hf_config.get("sliding_window") or None if is_on else None


def num_experts(hf_config: dict[str, Any]) -> int:
    """Experts of each layer, 0 in a dense model. `hf_config` is of one of FAMILIES."""
    if FAMILIES[hf_config["architectures"][0]].experts is None:
        return 0
    return hf_config.get("num_local_experts") or hf_config["num_experts"]  # either name, as Hugging Face writes both


def language_model(architecture: str) -> str:
    """The architecture with a language model's head: a critic's, or a reward model's, differs in its head alone."""
    for ending in REWARD_MODELS:
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + "ForCausalLM"
    return architecture
