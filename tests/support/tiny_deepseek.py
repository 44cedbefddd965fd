"""Tiny DeepSeek models: what differs from the other families' shape, and the one thing that is no parameter."""

import torch

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
DEEPSEEK_V2 = LATENT | {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}
DEEPSEEK_V3 = LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}


def move_router_biases(model: torch.nn.Module) -> None:
    """Give every router a bias that changes which experts it chooses, in fp32 as published models have it; transformers
    starts them at 0."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = 0.1 * torch.randn(module.num_experts, generator=generator)
