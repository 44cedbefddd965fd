"""The model families that are supported, by the first of `architectures` in config.json. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megappo.table import Table

RawValues = Mapping[str, Any]
"""Keys of config.json, and their values."""
HeadKind = Literal["policy", "value", "policy_value"]
"""Heads on a model's last hidden states: the language model's output layer, a critic's value head in its place, or
both side by side (a shared backbone)."""
REWARD_MODELS = ("ForTokenClassification", "ForSequenceClassification")
LANGUAGE_MODEL, WITH_VISION = "ForCausalLM", "ForConditionalGeneration"
"""Ends of names of language models, and of language models with a vision tower."""
ROTARY_PART = "partial_rotary_factor"
ROTARY_SIZE = "rotary_dim"
LINEAR_BLOCK = "linear_attn"
FULL_PATTERN = "full_attention_interval"
WINDOW_PATTERN = "sliding_window_pattern"
LOCAL_ROPE = "rope_local_base_freq"
K_IS_V = "attention_k_eq_v"
FULL_HEAD_SIZE = "global_head_dim"
FULL_KV_HEADS = "num_global_key_value_heads"
LAYER_SIZES = "per_layer_config"
LAYER_INPUT = "hidden_size_per_layer_input"
LOGIT_CAP = "final_logit_softcapping"
ROTATED = "no_rope_layers"
ROTATED_PATTERN = "no_rope_layer_interval"
ORIGINAL = "original_max_position_embeddings"
PLAIN_ROPE: dict[str, tuple[str, ...]] = {"default": ()}
YARN = PLAIN_ROPE | {"yarn": ("factor", ORIGINAL)}
LONG_ROPE = PLAIN_ROPE | {"longrope": ("short_factor", "long_factor", ORIGINAL)}
WITHOUT_YARN = PLAIN_ROPE | {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
}


@dataclass(frozen=True)
class ExpertFormat:
    """Format of a family's mixture of experts in config.json and in its weights.

    Attributes:
        ffn: key of config.json with an expert's inner size.
        count: keys with the number of experts, as Hugging Face writes one or the other.
        dense_layers: key with the number of first layers that have none; None = every layer has experts.
        block: module that holds router and experts in per-expert checkpoints.
        gate, up, down: an expert's matrices in them.
        renormalizes: the chosen experts' probabilities are divided by their sum; None = as `norm_topk_prob` has it.
        scaling: key with what the probabilities are multiplied by; None = nothing.
        router_bias: scores are sigmoids, not a softmax, and a bias without gradient is added to them for the choice.
        bias_name: name of this bias in `block`.
        fp32_router: routers compute in fp32.
        shared: module, in the MLP, of the expert that every token goes through; None where there is none.
        shared_ffn: keys whose product is its inner size.
        shared_gated: a gate of its own weights it.
        groups_rated_by: experts are in groups, `n_group` in config.json, of which a token reaches the best few,
            `topk_group`: a group's score is the sum of this number of its best scores. None = no groups.
        grouping_method: value of `topk_method` that switches the groups on; None = always on.
        router: module of the router in `block`.
        stacked: files and engines have a layer's experts in stacks, see `parameters.ExpertStack`.
    """

    ffn: str = "moe_intermediate_size"
    count: tuple[str, ...] = ("num_local_experts", "num_experts")
    dense_layers: str | None = None
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renormalizes: bool | None = None
    scaling: str | None = None
    router_bias: bool = False
    bias_name: str = "gate.e_score_correction_bias"
    fp32_router: bool = False
    shared: str | None = None
    shared_ffn: tuple[str, ...] = ()
    shared_gated: bool = False
    groups_rated_by: int | None = None
    grouping_method: str | None = None
    router: str = "gate"
    stacked: bool = False

    @property
    def keys(self) -> list[str]:
        """Keys that every config.json of the family has, besides one of `count`."""
        keys = [self.ffn, "num_experts_per_tok", *self.shared_ffn, self.dense_layers, self.scaling]
        return [key for key in keys if key]


@dataclass(frozen=True)
class Family:
    """Differences of a decoder from Llama.

    Attributes:
        qkv_bias, qk_layernorm: True, False, or the key of config.json that sets it.
        norms_all_heads: norms of queries and keys are over all heads together, not over each.
        linear_bias: all other matrices of the layers have a bias, too.
        sinks: each head attends to nothing with a learnable score, too (attention sinks).
        sliding_window: the window of config.json, if it has one, is on; else only `use_sliding_window` switches it on.
        window_pattern: every n-th layer attends to all tokens, the others to a window, where config.json has
            neither `layer_types` nor `sliding_window_pattern`; None = no layer is limited to the window.
        local_rope_theta: rotary base of the layers with a window, where config.json is silent; None = as in all layers.
        full_heads: layers without a window have heads of another size and number, and rotate a part of each
            (`proportional`).
        value_norms: values have norms without weights.
        layer_scalars: each layer's output is multiplied by a factor, which is loaded and not trained.
        experts: None for a dense model.
        rope_theta: rotary base where config.json is silent.
        default_rope: rotary positions where config.json has no section of them.
        rope_scalings: kinds of scaled rotary positions that transformers and SGLang compute alike, and the numbers that
            each takes.
        rotary_part: part of each head that has rotary positions, where config.json has no `partial_rotary_factor`; None
            = the whole head, and the key is not supported.
        unrotated_pattern: every n-th layer has no rotary positions, where config.json has neither
            `no_rope_layers` (1 = rotary) nor `no_rope_layer_interval`; None = all layers have them.
        flat_rope: SGLang reads `rope_theta` and `rope_scaling` of config.json, and not transformers 5's
            `rope_parameters`.
        rope_interleaved: rotary positions rotate neighbours, (0, 1), (2, 3), ..., not the halves of a head.
        activation: activation of gates, by its name in config.json.
        glu_limit: gates are cut off above it, what they multiply beyond it on either side; None = nothing is.
        glu_offset: added to what gates multiply.
        norms_add_one: norms multiply by their weight plus 1.
        norms: names of a layer's norms: of attention's input and output, of the MLP's input and output; None where
            there is none.
        scales: factor of `Scales` -> key of config.json and the power of its value.
        fused: block and matrix that the files have -> the matrices of which it is stacked.
        latent_attention: keys and values are made of one latent vector for all heads, queries perhaps of another
            (multi-head latent attention, DeepSeek-V2's report, section 2.1).
        linear_attention: most layers have linear attention (gated delta nets), the others an output gate. Format of
            its inputs, a key of `parameter_tables.LINEAR_INPUTS`; None = all layers have attention.
        vision: the model has a vision tower, and rotary positions of three numbers. Kind of the tower, a key of
            `parameter_tables.TOWERS`; None = text only.
        only: further keys of config.json with the values that are supported (see `config_keys.ONLY`); an absent key
            means one of them.
        defaults: values that absent keys have in transformers, where other families have others. null is not absent.
        ignores: further keys of config.json without effect (see `config_keys.WITHOUT_EFFECT`), or with the one that
            other switches give them.
    """

    qkv_bias: bool | str = False
    qk_layernorm: bool | str = False
    norms_all_heads: bool = False
    linear_bias: bool = False
    sinks: bool = False
    sliding_window: bool = False
    window_pattern: int | None = None
    local_rope_theta: float | None = None
    full_heads: bool = False
    value_norms: bool = False
    layer_scalars: bool = False
    experts: ExpertFormat | None = None
    rope_theta: float = 10000.0
    default_rope: RawValues = field(default_factory=dict)
    rope_scalings: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: WITHOUT_YARN | YARN)
    rotary_part: float | None = None
    unrotated_pattern: int | None = None
    flat_rope: bool = False
    rope_interleaved: bool = False
    activation: Literal["silu", "gelu_pytorch_tanh", "quick_gelu"] = "silu"
    glu_limit: float | None = None
    glu_offset: float = 0.0
    norms_add_one: bool = False
    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    scales: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    fused: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    latent_attention: bool = False
    linear_attention: Literal["by head", "apart"] | None = None
    vision: Literal["qwen2_5_vl", "qwen3_vl"] | None = None
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: RawValues = field(default_factory=dict)
    ignores: tuple[str, ...] = ()

    @property
    def rope_keys(self) -> tuple[str, ...]:
        """Further keys of rotary positions that are read. Without images they make no difference: text has one position
        a token."""
        sections = ("mrope_section", "mrope_interleaved") if self.linear_attention or self.vision else ()
        return sections if self.rotary_part is None else (ROTARY_PART, *sections)


_MIXTRAL = ExpertFormat(
    ffn="intermediate_size", block="block_sparse_moe", gate="w1", up="w3", down="w2", renormalizes=True
)
_QWEN2_MOE = ExpertFormat(shared="shared_expert", shared_ffn=("shared_expert_intermediate_size",), shared_gated=True)
_DEEPSEEK_V3 = ExpertFormat(
    count=("n_routed_experts",),
    dense_layers="first_k_dense_replace",
    renormalizes=True,
    scaling="routed_scaling_factor",
    router_bias=True,
    fp32_router=True,
    shared="shared_experts",
    shared_ffn=("moe_intermediate_size", "n_shared_experts"),
    groups_rated_by=2,
)
_DEEPSEEK_V2 = replace(
    _DEEPSEEK_V3,
    renormalizes=False,
    router_bias=False,
    groups_rated_by=1,
    grouping_method="group_limited_greedy",
)


def _deepseek(experts: ExpertFormat, scores: str, methods: tuple[str, ...]) -> Family:
    return Family(
        latent_attention=True,
        rope_scalings=YARN,
        experts=experts,
        only={
            "rope_interleave": (True,),
            "scoring_func": (scores,),
            "topk_method": methods,
            "norm_topk_prob": (experts.renormalizes,),
        },
        ignores=("ep_size", "seq_aux", "qk_head_dim", "n_group", "topk_group"),
    )


_LINEAR_CONV = {(LINEAR_BLOCK, "conv1d"): ("conv1d_q", "conv1d_k", "conv1d_v")}
_QWEN3_NEXT = Family(
    qk_layernorm=True,
    rope_scalings=WITHOUT_YARN,
    rotary_part=0.25,
    norms_add_one=True,
    experts=replace(_QWEN2_MOE, renormalizes=True),
    fused=_LINEAR_CONV,
    linear_attention="by head",
    only={"norm_topk_prob": (True,), "attn_output_gate": (True,)},
    ignores=(FULL_PATTERN,),
)
_QWEN3_5 = replace(
    _QWEN3_NEXT,
    experts=None,
    fused={(LINEAR_BLOCK, "in_proj_qkv"): ("in_proj_q", "in_proj_k", "in_proj_v"), **_LINEAR_CONV},
    linear_attention="apart",
    ignores=(FULL_PATTERN, "mamba_ssm_dtype", "mtp_num_hidden_layers"),
)
_WINDOW = {"sliding_window": 4096}
_TIED = {"tie_word_embeddings": True}
_STACKED_MLP = {("mlp", "gate_up_proj"): ("gate_proj", "up_proj")}
_GEMMA3 = Family(
    qk_layernorm=True,
    sliding_window=True,
    window_pattern=6,
    local_rope_theta=10000.0,
    rope_theta=1e6,
    rope_scalings=PLAIN_ROPE,
    activation="gelu_pytorch_tanh",
    norms_add_one=True,
    norms=(
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    scales={"embedding": ("hidden_size", 0.5), "attention": ("query_pre_attn_scalar", -0.5)},
    only={"hidden_activation": ("gelu_pytorch_tanh",)},
    defaults=_TIED | _WINDOW,
    ignores=(WINDOW_PATTERN, LOCAL_ROPE),
)
_GEMMA4 = replace(
    _GEMMA3,
    norms_add_one=False,
    scales={"embedding": ("hidden_size", 0.5), "attention": ("hidden_size", 0)},  # x ** 0 = 1
    full_heads=True,
    rope_scalings={"proportional": (ROTARY_PART,)},
    value_norms=True,
    layer_scalars=True,
    only={
        **_GEMMA3.only,
        LAYER_INPUT: (0,),
        "use_bidirectional_attention": ("vision", None),
    },
    defaults={"tie_word_embeddings": True, "sliding_window": 512},
    ignores=(
        *(K_IS_V, FULL_HEAD_SIZE, FULL_KV_HEADS, LAYER_SIZES, LOGIT_CAP, "vocab_size_per_layer_input"),
        # of experts and of shared keys and values, which enable_moe_block and num_kv_shared_layers refuse
        *("num_experts", "top_k_experts", "moe_intermediate_size", "use_double_wide_mlp"),
    ),
)


FAMILIES = Table(
    "model family",
    {
        "LlamaForCausalLM": Family(sliding_window=True),  # Meta's models have none
        "MistralForCausalLM": Family(sliding_window=True, defaults=_WINDOW),
        "Qwen2ForCausalLM": Family(qkv_bias=True, defaults=_WINDOW),
        "Qwen3ForCausalLM": Family(qk_layernorm=True, defaults=_WINDOW),
        "Qwen2_5_VLForConditionalGeneration": Family(
            qkv_bias=True, rope_theta=1e6, rope_scalings=PLAIN_ROPE, defaults=_WINDOW, vision="qwen2_5_vl"
        ),
        "Qwen3VLForConditionalGeneration": Family(
            qk_layernorm=True, rope_theta=500000.0, rope_scalings=PLAIN_ROPE, vision="qwen3_vl"
        ),
        "SeedOssForCausalLM": Family(qkv_bias=True, only={"attention_bias": (True,)}),
        "SmolLM3ForCausalLM": Family(
            unrotated_pattern=4, rope_theta=2e6, defaults=_TIED, ignores=(ROTATED, ROTATED_PATTERN)
        ),
        "MixtralForCausalLM": Family(
            sliding_window=True,
            experts=_MIXTRAL,
            rope_theta=1e6,
            rope_scalings=PLAIN_ROPE,
            only={"norm_topk_prob": (True,)},
        ),
        "Qwen2MoeForCausalLM": Family(qkv_bias=True, experts=_QWEN2_MOE, defaults=_WINDOW),
        "Qwen3MoeForCausalLM": Family(qk_layernorm=True, experts=ExpertFormat(), defaults=_WINDOW),
        "Glm4ForCausalLM": Family(
            qkv_bias="attention_bias",
            rotary_part=0.5,
            rope_interleaved=True,
            norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
            fused=_STACKED_MLP,
            defaults={"attention_bias": True},
        ),
        # Phi-3 and Phi-4
        "Phi3ForCausalLM": Family(
            sliding_window=True,
            rope_scalings=LONG_ROPE,
            rotary_part=1.0,
            only={"full_attn_mod": (1,)},
            defaults={ORIGINAL: 4096},
            fused={("self_attn", "qkv_proj"): ("q_proj", "k_proj", "v_proj"), **_STACKED_MLP},
        ),
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma4ForCausalLM": _GEMMA4,
        "Olmo3ForCausalLM": Family(
            qk_layernorm=True,
            norms_all_heads=True,
            sliding_window=True,
            window_pattern=4,
            local_rope_theta=500000.0,
            rope_theta=500000.0,
            flat_rope=True,
            defaults=_WINDOW,
            norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        ),
        "GraniteForCausalLM": Family(
            scales={
                "embedding": ("embedding_multiplier", 1),
                "attention": ("attention_multiplier", 1),
                "blocks": ("residual_multiplier", 1),
                "logits": ("logits_scaling", -1),
            },
        ),
        # GLM-4.5 to 4.7: the layers of Qwen3, the experts of DeepSeek-V3
        "Glm4MoeForCausalLM": Family(
            qkv_bias="attention_bias",
            qk_layernorm="use_qk_norm",
            rotary_part=0.5,
            experts=_DEEPSEEK_V3,
            only={"norm_topk_prob": (True,)},
        ),
        # MiniMax-M2 to 2.5
        "MiniMaxM2ForCausalLM": Family(
            qk_layernorm=True,
            norms_all_heads=True,
            rope_theta=5e6,
            rotary_part=1.0,
            experts=replace(
                _MIXTRAL,
                router_bias=True,
                fp32_router=True,
                bias_name="e_score_correction_bias",
            ),
            only={
                "qk_norm_type": ("per_layer",),
                "scoring_func": ("sigmoid",),
                "use_routing_bias": (True,),
                **dict.fromkeys((f"layernorm_{block}_beta" for block in ("full_attention", "mlp")), (1,)),
            },
            ignores=(
                *("attn_type_list", "mlp_intermediate_size", "shared_moe_mode", "layernorm_linear_attention_beta"),
                *("use_mtp", "num_mtp_modules", "mtp_transformer_layers", ROTARY_SIZE),
            ),
        ),
        "GptOssForCausalLM": Family(
            qkv_bias=True,
            linear_bias=True,
            sinks=True,
            sliding_window=True,
            window_pattern=2,
            rope_theta=150000.0,
            activation="quick_gelu",
            glu_limit=7.0,
            glu_offset=1.0,
            experts=ExpertFormat(
                ffn="intermediate_size",
                renormalizes=True,
                router="router",
                stacked=True,
            ),
            only={
                "attention_bias": (True,),
                "hidden_act": ("silu",),
                "swiglu_limit": (7.0,),
                **dict.fromkeys(("swiglu_alpha", "hidden_act_alpha"), (1.702,)),
            },
            default_rope={"rope_type": "yarn", "factor": 32.0, "truncate": False, ORIGINAL: 4096},
            defaults={"sliding_window": 128},
            ignores=("experts_per_token",),  # the same as num_experts_per_tok
        ),
        "Qwen3NextForCausalLM": _QWEN3_NEXT,
        "Qwen3_5ForCausalLM": _QWEN3_5,
        "Qwen3_5MoeForCausalLM": replace(_QWEN3_5, experts=_QWEN3_NEXT.experts),
        "DeepseekV2ForCausalLM": _deepseek(_DEEPSEEK_V2, "softmax", ("greedy", "group_limited_greedy")),
        "DeepseekV3ForCausalLM": _deepseek(_DEEPSEEK_V3, "sigmoid", ("noaux_tc",)),
    },
)

_SPARSE = " (attention to the tokens that an indexer picks is not supported)"
_CHUNKED = " (attention in chunks, and scaled by position, is not supported)"
_TOWER = " (its vision tower is not supported)"
LEFT_OUT = {
    "DeepseekV32ForCausalLM": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "Glm5NextForConditionalGeneration": _SPARSE,
    "Llama4ForCausalLM": _CHUNKED,
    "Llama4ForConditionalGeneration": _CHUNKED,
    "Gemma3ForConditionalGeneration": " (image tokens that attend to each other in both directions are not supported)",
    "Qwen2VLForConditionalGeneration": _TOWER,
    "Qwen3VLMoeForConditionalGeneration": " (a vision tower before a mixture of experts is not supported)",
}
"""Architectures that users may expect -> what of them is not supported; docs/models.md has the reasons."""


def language_model(architecture: str) -> str:
    """Return the architecture with a language model's head; a critic's or reward model's differs in its head only."""
    for ending in REWARD_MODELS:
        if architecture.endswith(ending):
            name = architecture.removesuffix(ending)
            if name + WITH_VISION in FAMILIES:
                return name + WITH_VISION
            return name.removesuffix("Text") + LANGUAGE_MODEL  # Gemma 3's has it
    return architecture
