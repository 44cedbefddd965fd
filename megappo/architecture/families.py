"""The model families this version trains, by the first of `architectures` in config.json."""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from megappo.config.schema import Parallel


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token goes through besides.

    Attributes:
        module: its name in the block.
        ffn: key of config.json with its inner size.
        count: key with the number of such experts that it is made of; None = one.
        gated: a gate of its own weights it.
    """

    module: str = "shared_expert"
    ffn: str = "shared_expert_intermediate_size"
    count: str | None = None
    gated: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        """What in config.json says how large it is."""
        return (self.ffn, self.count) if self.count else (self.ffn,)

    @property
    def label(self) -> str:
        """Its inner size, in words of config.json."""
        return " x ".join(self.keys)

    def ffn_size(self, hf_config: dict[str, Any]) -> int:
        """Its inner size."""
        return prod(hf_config[key] for key in self.keys)


@dataclass(frozen=True)
class Experts:
    """How a family's mixture of experts is described and stored; every layer is one but the first few of DeepSeek's.

    Attributes:
        ffn: key of config.json with an expert's inner size.
        block: module that holds router and experts in per-expert checkpoints.
        gate, up, down: an expert's matrices in them.
        renormalizes: the chosen experts' probabilities are divided by their sum; None = `norm_topk_prob` says so.
        shared: None where there is no shared expert.
        router_bias: scores are sigmoids, not a softmax, and a bias that no gradient reaches has a say in the choice.
        count: keys of config.json with the number of experts, as Hugging Face writes one or the other.
    """

    ffn: str = "moe_intermediate_size"
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renormalizes: bool | None = None
    shared: SharedExpert | None = None
    router_bias: bool = False
    count: tuple[str, ...] = ("num_local_experts", "num_experts")

    def renormalized(self, hf_config: dict[str, Any]) -> bool:
        """Whether the chosen experts' probabilities add up to 1."""
        return bool(hf_config.get("norm_topk_prob", False) if self.renormalizes is None else self.renormalizes)


HeadKind = Literal["policy", "value", "policy_value"]
"""What reads a model's last hidden states: the language model's output layer, a critic's value head in its place, or
both side by side (a shared backbone)."""
BIAS_KEY = "value_head_bias"
REWARD_MODELS = ("ForTokenClassification", "ForSequenceClassification")


@dataclass(frozen=True)
class Family:
    """In what a decoder differs from Llama.

    Attributes:
        sliding_window: the window of config.json, if it has one, is on; else only `use_sliding_window` switches it on.
        experts: None for a dense model.
        rope_theta: rotary base where config.json is silent.
        latent_attention: keys and values are made of one latent vector for all heads, queries perhaps of another
            (multi-head latent attention, DeepSeek-V2's report, section 2.1).
    """

    qkv_bias: bool = False
    qk_layernorm: bool = False
    sliding_window: bool = False
    experts: Experts | None = None
    rope_theta: float = 10000.0
    latent_attention: bool = False


_DEEPSEEK_SHARED = SharedExpert("shared_experts", "moe_intermediate_size", "n_shared_experts", gated=False)
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
    "Qwen2MoeForCausalLM": Family(qkv_bias=True, experts=Experts(shared=SharedExpert())),
    "Qwen3MoeForCausalLM": Family(qk_layernorm=True, experts=Experts()),
    "DeepseekV2ForCausalLM": Family(
        latent_attention=True,
        experts=Experts(renormalizes=False, shared=_DEEPSEEK_SHARED, count=("n_routed_experts",)),
    ),
    "DeepseekV3ForCausalLM": Family(
        latent_attention=True,
        experts=Experts(renormalizes=True, shared=_DEEPSEEK_SHARED, router_bias=True, count=("n_routed_experts",)),
    ),
}


def family_of(hf_config: dict[str, Any]) -> Family:
    """The family of a config.json that is of one of FAMILIES."""
    return FAMILIES[hf_config["architectures"][0]]


def sliding_window(hf_config: dict[str, Any]) -> int | None:
    """Tokens that some layer attends to at most; None where nothing limits them. `hf_config` is of one of FAMILIES."""
    is_on = family_of(hf_config).sliding_window or hf_config.get("use_sliding_window")
    return hf_config.get("sliding_window") or None if is_on else None


def num_experts(hf_config: dict[str, Any]) -> int:
    """Experts of each layer that has them, 0 in a dense model. `hf_config` is of one of FAMILIES."""
    experts = family_of(hf_config).experts
    return 0 if experts is None else next(hf_config[key] for key in experts.count if hf_config.get(key))


def num_dense_layers(hf_config: dict[str, Any]) -> int:
    """The first layers, which have no experts: all of a dense model's. `hf_config` is of one of FAMILIES."""
    family = family_of(hf_config)
    if family.experts is None:
        return hf_config["num_hidden_layers"]
    return min(hf_config["first_k_dense_replace"], hf_config["num_hidden_layers"]) if family.latent_attention else 0


def num_key_value_heads(hf_config: dict[str, Any]) -> int:
    """Heads of keys and values, where they are not made of a latent vector."""
    return hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"]


def divided_sizes(hf_config: dict[str, Any], parallel: Parallel) -> dict[str, tuple[int, str, int]]:
    """What a layout divides: key of config.json -> its size, the dimension of the layout, and its ranks.

    `hf_config` is of one of FAMILIES.
    """
    family = family_of(hf_config)
    divided = {"num_attention_heads": (hf_config["num_attention_heads"], "tensor", parallel.tensor)}
    if not family.latent_attention:  # whose heads all make their keys and values of the same vector
        divided["num_key_value_heads"] = (num_key_value_heads(hf_config), "tensor", parallel.tensor)
    if num_dense_layers(hf_config):
        divided["intermediate_size"] = (hf_config["intermediate_size"], "tensor", parallel.tensor)
    experts = family.experts
    if experts:
        divided[experts.count[-1]] = (num_experts(hf_config), "expert", parallel.expert)
        divided[experts.ffn] = (hf_config[experts.ffn], "expert_tensor", parallel.expert_tensor)
    if experts and experts.shared:
        divided[experts.shared.label] = (experts.shared.ffn_size(hf_config), "tensor", parallel.tensor)
    return divided


def language_model(architecture: str) -> str:
    """The architecture with a language model's head: a critic's, or a reward model's, differs in its head alone."""
    for ending in REWARD_MODELS:
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + "ForCausalLM"
    return architecture


def is_tied(hf_config: dict[str, Any]) -> bool:
    """Whether the output layer is the embedding. Hugging Face's default, where config.json is silent, is no."""
    return bool(hf_config.get("tie_word_embeddings", False))


def has_bias(hf_config: dict[str, Any]) -> bool:
    """Whether the value head of a model of this config has a bias: where it comes from a reward model that has one."""
    return bool(hf_config.get(BIAS_KEY, False))
