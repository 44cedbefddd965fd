"""The model families that are supported, by the first of `architectures` in config.json. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megappo.table import Table

HeadKind = Literal["policy", "value", "policy_value"]
"""Heads on a model's last hidden states: the language model's output layer, a critic's value head in its place, or
both side by side (a shared backbone)."""
REWARD_MODELS = ("ForTokenClassification", "ForSequenceClassification")
LANGUAGE_MODEL = "ForCausalLM"
SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
LATENT_SCALINGS = {"default": (), "yarn": ("factor", "original_max_position_embeddings")}


@dataclass(frozen=True)
class SharedExpertFormat:
    """Format of an expert that every token goes through, besides those that it is routed to.

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
        """Keys of config.json whose product is its inner size."""
        return (self.ffn, self.count) if self.count else (self.ffn,)


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in groups, `n_group` in config.json, of which a token reaches the best few, `topk_group`.

    Attributes:
        rated_by: a group is as good as the sum of its best so many experts.
        method: the value of `topk_method` that switches the groups on; None = always.
    """

    rated_by: int
    method: str | None = None


@dataclass(frozen=True)
class ExpertFormat:
    """Format of a family's mixture of experts in config.json and in its weights.

    Attributes:
        ffn: key of config.json with an expert's inner size.
        block: module that holds router and experts in per-expert checkpoints.
        gate, up, down: an expert's matrices in them.
        renormalizes: the chosen experts' probabilities are divided by their sum; None = as `norm_topk_prob` has it.
        shared: None where there is no shared expert.
        router_bias: scores are sigmoids, not a softmax, and a bias without gradient is added to them for the choice.
        count: keys of config.json with the number of experts, as Hugging Face writes one or the other.
        dense_layers: key with the number of first layers that have none; None = every layer has experts.
        scaling: key with what the probabilities are multiplied by; None = nothing.
        groups: None where a token may go to any expert.
        fp32_router: routers compute in fp32.
    """

    ffn: str = "moe_intermediate_size"
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renormalizes: bool | None = None
    shared: SharedExpertFormat | None = None
    router_bias: bool = False
    count: tuple[str, ...] = ("num_local_experts", "num_experts")
    dense_layers: str | None = None
    scaling: str | None = None
    groups: ExpertGroups | None = None
    fp32_router: bool = False

    @property
    def keys(self) -> list[str]:
        """Keys that every config.json of the family has."""
        shared = self.shared.keys if self.shared else ()
        return [key for key in (self.ffn, "num_experts_per_tok", *shared, self.dense_layers, self.scaling) if key]


@dataclass(frozen=True)
class Family:
    """Differences of a decoder from Llama.

    Attributes:
        sliding_window: the window of config.json, if it has one, is on; else only `use_sliding_window` switches it on.
        experts: None for a dense model.
        rope_theta: rotary base where config.json is silent.
        latent_attention: keys and values are made of one latent vector for all heads, queries perhaps of another
            (multi-head latent attention, DeepSeek-V2's report, section 2.1).
        only: further keys of config.json with the values that are supported (see `parsing.ONLY`); an absent key
            means one of them.
        ignores: further keys of config.json without effect (see `config_json.WITHOUT_EFFECT`).
    """

    qkv_bias: bool = False
    qk_layernorm: bool = False
    sliding_window: bool = False
    experts: ExpertFormat | None = None
    rope_theta: float = 10000.0
    latent_attention: bool = False
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignores: tuple[str, ...] = ()

    @property
    def rope_scalings(self) -> Mapping[str, tuple[str, ...]]:
        """Kinds of scaled rotary positions that are computed, and the numbers that each takes."""
        return LATENT_SCALINGS if self.latent_attention else SCALINGS


def _deepseek(renormalizes: bool, scores: str, methods: tuple[str, ...], **experts: Any) -> Family:
    return Family(
        latent_attention=True,
        experts=ExpertFormat(
            renormalizes=renormalizes,
            shared=SharedExpertFormat("shared_experts", "moe_intermediate_size", "n_shared_experts", gated=False),
            count=("n_routed_experts",),
            dense_layers="first_k_dense_replace",
            scaling="routed_scaling_factor",
            fp32_router=True,
            **experts,
        ),
        only={
            "rope_interleave": (True,),
            "scoring_func": (scores,),
            "topk_method": methods,
            "norm_topk_prob": (renormalizes,),
        },
        ignores=("ep_size", "seq_aux", "qk_head_dim", "n_group", "topk_group"),
    )


FAMILIES = Table(
    "model family",
    {
        "LlamaForCausalLM": Family(sliding_window=True),  # Meta's models have none
        "MistralForCausalLM": Family(sliding_window=True),
        "Qwen2ForCausalLM": Family(qkv_bias=True),
        "Qwen3ForCausalLM": Family(qk_layernorm=True),
        "MixtralForCausalLM": Family(
            sliding_window=True,
            experts=ExpertFormat("intermediate_size", "block_sparse_moe", "w1", "w3", "w2", renormalizes=True),
            rope_theta=1e6,
            only={"norm_topk_prob": (True,)},
        ),
        "Qwen2MoeForCausalLM": Family(qkv_bias=True, experts=ExpertFormat(shared=SharedExpertFormat())),
        "Qwen3MoeForCausalLM": Family(qk_layernorm=True, experts=ExpertFormat()),
        "DeepseekV2ForCausalLM": _deepseek(
            False, "softmax", ("greedy", "group_limited_greedy"), groups=ExpertGroups(1, "group_limited_greedy")
        ),
        "DeepseekV3ForCausalLM": _deepseek(
            True, "sigmoid", ("noaux_tc",), router_bias=True, groups=ExpertGroups(rated_by=2)
        ),
    },
)


def language_model(architecture: str) -> str:
    """The architecture with a language model's head: a critic's, or a reward model's, differs in its head alone."""
    for ending in REWARD_MODELS:
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + LANGUAGE_MODEL
    return architecture
