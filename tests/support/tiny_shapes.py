"""Sizes of tiny models: one table for all tests that need no other sizes."""

import re
from math import log

VOCAB_SIZE = 91  # odd: every tensor-parallel layout pads it
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.1,
    "original_max_position_embeddings": 16,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "rope_parameters": YARN,
    "moe_layer_freq": 1,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500.0}
DEEPSEEK_V2 = LATENT | {
    **{"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False},
    **{"n_group": 1, "topk_group": 1},
}
DEEPSEEK_V3 = LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
GLM4_MOE = {
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.7,
}
MINIMAX_M2 = {
    **{"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
    **{"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "rotary_dim": 8},
}
TWO_LAYERS = {"num_hidden_layers": 2}
GLM4 = {"head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True, "pad_token_id": None}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.7, "attention_multiplier": 0.2}
LONG_ROPE = {
    **{"rope_type": "longrope", "short_factor": [1.2, 1.7], "long_factor": [2.5, 6.0]},
    **{"rope_theta": 500.0, "original_max_position_embeddings": 32},
}
PHI3 = {
    **{"partial_rotary_factor": 0.5, "sliding_window": 64, "pad_token_id": None, "eos_token_id": 1},
    **{"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32},
}
GEMMA3 = {
    **{"head_dim": 16, "query_pre_attn_scalar": 10, "sliding_window": 4, "pad_token_id": None},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}
GEMMA4 = {
    **{"head_dim": 16, "num_key_value_heads": 4, "global_head_dim": 24, "num_global_key_value_heads": 2},
    **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0},
    **{"sliding_window": 4, "pad_token_id": None, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    },
}
QWEN3_5 = {
    **{"head_dim": 16, "partial_rotary_factor": 0.25, "full_attention_interval": 2, "linear_conv_kernel_dim": 3},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
}
QWEN3_NEXT = QWEN3_5 | EXPERTS | {"shared_expert_intermediate_size": 40}
SMOLLM3 = {"no_rope_layers": [1, 0, 1, 0], "pad_token_id": None}
SEED_OSS = {"head_dim": 16}
VARIANTS = {"glm4": GLM4, "gemma3_text": GEMMA3, "phi3": PHI3, "granite": GRANITE, "qwen3_5_text": QWEN3_5}
OLMO3 = {
    **{"sliding_window": 4, "pad_token_id": None},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"attention_factor": 0.1 * log(4.0) + 1}
        | {key: YARN[key] for key in YARN.keys() - {"mscale", "mscale_all_dim"}},
    },
}
VARIANTS |= {"seed_oss": SEED_OSS, "smollm3": SMOLLM3, "olmo3": OLMO3}
"""Changes to SHAPE, by Hugging Face's model_type: dense families that differ from Llama in more than biases and norms
of queries and keys."""
MIXTURES = {
    "mixtral": TWO_LAYERS | {"num_local_experts": 4},
    "qwen2_moe": TWO_LAYERS | EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": TWO_LAYERS | EXPERTS,
    "glm4_moe": TWO_LAYERS | GLM4_MOE,
    "minimax_m2": TWO_LAYERS | MINIMAX_M2,
    "qwen3_next": TWO_LAYERS | QWEN3_NEXT,
    "qwen3_5_moe_text": TWO_LAYERS | QWEN3_NEXT,
    "deepseek_v2": TWO_LAYERS | DEEPSEEK_V2,
    "deepseek_v3": TWO_LAYERS | DEEPSEEK_V3 | {"head_dim": DEEPSEEK_V3["qk_rope_head_dim"]},
}
"""Changes to SHAPE, by Hugging Face's model_type."""

GPT_OSS = {
    **{"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "sliding_window": 4,
    "rope_parameters": {key: YARN[key] for key in YARN.keys() - {"mscale", "mscale_all_dim"}} | {"truncate": False},
}
"""Changes to SHAPE of model_type gpt_oss, which TransformerEngine's layers do not compute."""
OF_TORCH = {"gemma4_text": GEMMA4}
"""Further variants, whose heads are too large for TransformerEngine."""
CHANGES = VARIANTS | OF_TORCH | MIXTURES | {"gpt_oss": GPT_OSS}
"""All of them."""

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 6,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
}
"""A config.json to be parsed, whose sizes divide by 2 and 3; the others are what differs from it."""
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
V2, V3 = (
    LATENT | {"architectures": [f"Deepseek{version}ForCausalLM"], "num_attention_heads": 4, "num_hidden_layers": 4}
    for version in ("V2", "V3")
)


UNUSUAL = {"smollm3": "SmolLM3ForCausalLM", "minimax_m2": "MiniMaxM2ForCausalLM"}
"""Architectures whose capital letters no underscore announces."""


def architecture_of(model_type: str) -> str:
    """Return the architecture of Hugging Face's model_type: of glm4_moe Glm4MoeForCausalLM."""
    if model_type in UNUSUAL:
        return UNUSUAL[model_type]
    return re.sub("(^|_)([a-z])", lambda found: found[2].upper(), model_type.removesuffix("_text")) + "ForCausalLM"
