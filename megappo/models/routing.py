"""How a mixture of experts routes tokens: Megatron's settings, what they cannot express, the routers' biases."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megappo.architecture.families import Experts, family_of, num_dense_layers, num_experts
from megappo.config.schema import Parallel


def expert_arguments(hf: dict[str, Any], parallel: Parallel) -> dict[str, Any]:
    """TransformerConfig's arguments of a mixture of experts; none of a dense model.

    The router softmaxes over all experts and keeps the largest probabilities, or (the same as dividing these by their
    sum) softmaxes over the largest logits. Nothing is added to the loss and no token is dropped.
    """
    experts = family_of(hf).experts
    if experts is None:
        return {}
    num_dense = num_dense_layers(hf)
    return {
        "num_moe_experts": num_experts(hf),
        # A list, even of equal layers, makes Megatron name each layer in a checkpoint instead of stacking them.
        "moe_layer_freq": [int(layer >= num_dense) for layer in range(hf["num_hidden_layers"])] if num_dense else 1,
        "moe_ffn_hidden_size": hf[experts.ffn],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_pre_softmax": not experts.renormalized(hf),
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": experts.shared.ffn_size(hf) if experts.shared else None,
        "moe_shared_expert_gate": bool(experts.shared and experts.shared.gated),
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        **(_bias_arguments() if experts.router_bias else {}),
        **(_group_arguments(hf) if family_of(hf).latent_attention else {}),
    }


def _bias_arguments() -> dict[str, Any]:
    """Sigmoid scores, divided by their sum over the chosen experts. The bias, which pretraining moves to balance the
    load, stays as it was loaded: at a rate of 0 Megatron adds 0 to it."""
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
    }


def _group_arguments(hf: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek's: probabilities are scaled, routers compute in fp32, and a token's experts are in few groups."""
    grouped = {"moe_router_num_groups": hf["n_group"], "moe_router_group_topk": hf["topk_group"]}
    return {
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_dtype": "fp32",
        **(grouped if _is_grouped(hf) else {}),
    }


def _is_grouped(hf: dict[str, Any]) -> bool:
    """Whether some groups of experts are out of reach of a token."""
    if not family_of(hf).experts.router_bias and hf.get("topk_method") != "group_limited_greedy":
        return False
    return hf["topk_group"] < hf["n_group"]


def unsupported_routing(hf: dict[str, Any], experts: Experts) -> dict[str, bool]:
    """Keys of config.json about routing, and whether Megatron cannot do what they say."""
    found = {
        "decoder_sparse_step": hf.get("decoder_sparse_step", 1) != 1,
        "mlp_only_layers": bool(hf.get("mlp_only_layers")),
        "router_jitter_noise": bool(hf.get("router_jitter_noise")),
        # Its probability would always be 1, and the router could not learn.
        "num_experts_per_tok": experts.renormalized(hf) and hf["num_experts_per_tok"] == 1,
        "moe_layer_freq": hf.get("moe_layer_freq", 1) != 1,
    }
    if not family_of(hf).latent_attention:
        return found
    methods = ("noaux_tc",) if experts.router_bias else ("greedy", "group_limited_greedy")
    rated_by = 2 if experts.router_bias else 1
    return found | {
        "n_shared_experts": not hf["n_shared_experts"],
        "scoring_func": hf.get("scoring_func", _scores(experts)) != _scores(experts),
        "topk_method": hf.get("topk_method", methods[0]) not in methods,
        "norm_topk_prob": hf.get("norm_topk_prob", experts.renormalizes) != experts.renormalizes,
        # The score of a group is its best expert's (V2) or its best two's (V3); to Megatron that of as many as a token
        # gets in each of its groups.
        "topk_group": _is_grouped(hf) and hf["num_experts_per_tok"] // hf["topk_group"] != rated_by,
    }


def _scores(experts: Experts) -> str:
    return "sigmoid" if experts.router_bias else "softmax"


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
