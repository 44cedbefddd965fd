"""How a mixture of experts routes tokens: Megatron's settings, and the routers' biases."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megappo.architecture.architecture import Architecture
from megappo.config.schema import Parallel


def expert_arguments(architecture: Architecture, parallel: Parallel) -> dict[str, Any]:
    """TransformerConfig's arguments of a mixture of experts; none of a dense model.

    The router softmaxes over all experts and keeps the largest probabilities, or (the same as dividing these by their
    sum) softmaxes over the largest logits. Nothing is added to the loss and no token is dropped.
    """
    experts, written = architecture.experts, architecture.family.experts
    if experts is None or written is None:
        return {}
    dense, layers = experts.num_dense_layers, architecture.num_layers
    num_groups, group_top_k = experts.groups or (None, None)
    return {
        "num_moe_experts": experts.count,
        # A list, even of equal layers, makes Megatron name each layer in a checkpoint instead of stacking them.
        "moe_layer_freq": [int(layer >= dense) for layer in range(layers)] if dense else 1,
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_router_topk": experts.top_k,
        "moe_router_pre_softmax": not experts.renormalizes,
        "moe_router_load_balancing_type": "none",
        "moe_router_topk_scaling_factor": experts.scaling,
        "moe_router_dtype": "fp32" if written.fp32_router else None,
        "moe_router_num_groups": num_groups,
        "moe_router_group_topk": group_top_k,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size,
        "moe_shared_expert_gate": bool(written.shared and written.shared.gated),
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        **(_bias_arguments() if written.router_bias else {}),
    }


def _bias_arguments() -> dict[str, Any]:
    """Sigmoid scores, divided by their sum over the chosen experts. The bias, which pretraining moves to balance the
    load, stays as it was loaded: at a rate of 0 Megatron adds 0 to it."""
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
    }


@contextmanager
def router_bias_kept(model: torch.nn.Module) -> Iterator[None]:
    """Whatever casts or moves the model meanwhile leaves its routers' biases in fp32, to the bit.

    Megatron casts them back to fp32 before each use, but a cast to bf16 has rounded them by then.
    """
    routers = [module for module in model.modules() if getattr(module, "expert_bias", None) is not None]
    kept = [router.expert_bias for router in routers]
    yield
    for router, bias in zip(routers, kept, strict=True):
        router.expert_bias = bias.to(router.expert_bias.device)
