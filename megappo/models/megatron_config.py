"""megatron-core's TransformerConfig and GPTModel arguments for an Architecture."""

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import exp
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from megappo.architecture.architecture import DTYPES, Architecture, Heads, LatentAttention, LinearAttention, Rope
from megappo.architecture.fit import fit_errors
from megappo.architecture.parameters import padded_vocab_size
from megappo.architecture.switches import LAYERS
from megappo.config.config_error import ConfigError
from megappo.config.schema import Model
from megappo.config.sections import Parallel
from megappo.runtime import platform
from megappo.runtime.megatron_patches import import_deep_ep

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.torch) for name, dtype in DTYPES.items()}
"""torch's dtypes by the names of config keys."""
ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"), "quick_gelu": quick_gelu}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@dataclass
class HeadsConfig(TransformerConfig):
    """TransformerConfig of layers with different heads: Megatron builds each layer from a config of its own.

    Attributes:
        heads: heads of each layer of the model.
    """

    heads: Sequence[Heads] = ()

    def get_config_for_layer(self, layer_number: int) -> TransformerConfig:
        """Return the config of a layer, numbered from 1; `keys_are_values` of its heads is added."""
        config = copy(self)
        heads = self.heads[layer_number - 1]
        config.kv_channels = heads.size
        config.num_query_groups = heads.kv_heads
        config.keys_are_values = heads.keys_are_values
        return config


def transformer_config(
    architecture: Architecture,
    model: Model,
    parallel: Parallel,
    recompute: str,
    switches: frozenset[str],
) -> TransformerConfig:
    """Return Megatron's description of the layers, in one layout.

    Args:
        parallel: layout without contradictions between its own keys.
        recompute: "none", "selective" (attention) or "full" (every layer).
        switches: what is on (see `architecture.switches`); the layers and the engine read it off the config.
    Raises:
        ConfigError: the model does not fit the layout.
    """
    if errors := list(fit_errors(architecture, parallel)):
        raise ConfigError(*errors)
    dtype = TORCH_DTYPES[model.dtype]
    kind = MLATransformerConfig if architecture.latent else TransformerConfig
    config = (HeadsConfig if architecture.full_heads else kind)(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_size,
        num_attention_heads=architecture.num_heads,
        **_attention_arguments(architecture),
        **_linear_arguments(architecture.linear),
        layernorm_epsilon=architecture.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[architecture.family.activation],
        activation_func_clamp_value=architecture.family.glu_limit,
        glu_linear_offset=architecture.family.glu_offset,
        layernorm_zero_centered_gamma=architecture.family.norms_add_one,
        add_bias_linear=architecture.family.linear_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.sequence,
        **_pipeline_arguments(parallel),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        attention_softmax_in_fp32=True,
        attention_backend=AttnBackend.fused,  # by default TransformerEngine pads packs where it has no kernel for them
        calculate_per_token_loss=True,
        cuda_graph_scope=[],  # whole layers, if any; Megatron's default, "full", is deprecated
        variable_seq_lengths=True,  # packed micro-batches differ in length
        moe_token_dispatcher_type=_dispatcher(parallel, model),
        # Every weight is loaded later. An initialization still has to mark weights as sharded: else they would be
        # missing in the gradient norm of all tensor-parallel ranks except the first. On a CPU Megatron would draw every
        # weight whole, in float32, on each rank.
        use_cpu_initialization=not platform.has_cuda(),
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        **_expert_arguments(architecture, parallel),
        **{name: name in switches for name in LAYERS},
        **RECOMPUTE[recompute],
    )
    config.switches = switches
    config.logit_cap = architecture.logit_cap
    config.vision = architecture.vision
    return _with_magnitude(config, architecture.rope)


def _with_magnitude(config: TransformerConfig, rope: Rope) -> TransformerConfig:
    """Set YaRN's keys where attention must multiply cosines and sines by their magnitude (`Rope.scales_part`).

    Megatron's factor is 0.1 * log(yarn_rotary_scaling_factor) * yarn_mscale + 1, here with log(...) = 10.
    """
    if rope.scales_part:
        config.yarn_rotary_scaling_factor = exp(10)
        config.yarn_mscale_all_dim = 0.0
        config.yarn_mscale = rope.magnitude - 1
    return config


def _dispatcher(parallel: Parallel, model: Model) -> str:
    """Return Megatron's name of the token dispatcher: "alltoall", or "flex", whose default backend is DeepEP. With
    `variable_seq_lengths` Megatron takes no other, even for dense models.

    Raises:
        ConfigError: DeepEP cannot be imported, or does not support the dtype.
    """
    if parallel.dispatcher == "alltoall":
        return "alltoall"
    try:
        import_deep_ep()
    except Exception as error:  # it asserts that CUDA's compiler and one NCCL are there
        reason = f"{type(error).__name__} {error}".rstrip()
        raise ConfigError(
            f"parallel.dispatcher deepep: the package deep_ep cannot be imported ({reason}). It needs GPUs, CUDA's "
            "compiler (CUDA_HOME), and no NCCL but pip's: megappo doctor megatron tries it; or set the key to alltoall"
        ) from error
    if model.dtype != "bf16":
        raise ConfigError(
            f"parallel.dispatcher deepep needs bf16, found model.dtype {model.dtype}: set model.dtype to bf16, or "
            "parallel.dispatcher to alltoall"
        )
    # Megatron warns at each dispatch (megatron-core 0.16.1) if the routers' probabilities are in bf16, as some families
    # have them. DeepEP gets them in fp32, which is exact.
    logging.getLogger("megatron.core.transformer.moe.token_dispatcher").setLevel(logging.ERROR)
    return "flex"


def _leave(weight: Tensor) -> Tensor:
    """Leave a weight as it is: an initialization that initializes nothing."""
    return weight


def _attention_arguments(architecture: Architecture) -> dict[str, Any]:
    """TransformerConfig's arguments of attention, whose heads have keys and values of their own, or share them."""
    if architecture.latent:
        return _latent_arguments(architecture.latent, architecture.rope)
    window = architecture.sliding_window if any(architecture.windows) else None
    heads = [architecture.heads_of(layer) for layer in range(architecture.num_layers)]
    return {
        **({"heads": heads, "heterogeneous_block_specs": True} if architecture.full_heads else {}),
        "num_query_groups": architecture.num_kv_heads,
        "kv_channels": architecture.head_size,
        "add_qkv_bias": architecture.qkv_bias,
        "qk_layernorm": architecture.qk_layernorm and not architecture.family.norms_all_heads,
        "window_size": (window - 1, 0) if window else None,
        "window_attn_skip_freq": list(map(int, architecture.windows)) or None,  # 1 = has the window
        "no_rope_freq": list(map(int, architecture.unrotated)) or None,  # 1 = has no rotary positions
        "softmax_scale": _softmax_scale(architecture),
        "softmax_type": "learnable" if architecture.family.sinks else "vanilla",
        "rotary_interleaved": architecture.family.rope_interleaved,
    }


def _linear_arguments(linear: LinearAttention | None) -> dict[str, Any]:
    """Return TransformerConfig's arguments of linear attention, and of the output gates of the other layers."""
    if linear is None:
        return {}
    return {
        "attention_output_gate": True,
        # A list makes Megatron name each layer in a checkpoint: they differ.
        "linear_attention_freq": list(map(int, linear.layers)),
        "linear_num_key_heads": linear.key_heads,
        "linear_num_value_heads": linear.value_heads,
        "linear_key_head_dim": linear.key_size,
        "linear_value_head_dim": linear.value_size,
        "linear_conv_kernel_dim": linear.kernel,
    }


def _softmax_scale(architecture: Architecture) -> float | None:
    """Return the factor of the products of queries and keys; None = 1 / sqrt(size of a head). The factor of cosines and
    sines of a whole head is in it, as they are in queries and keys alike."""
    scale = architecture.scales.attention
    rope = architecture.rope
    # With a rotary base of their own, layers with a window have no such factor: see add_norms_of_all_heads.
    if rope.magnitude == 1 or rope.scales_part or architecture.local_rope_base:
        return scale
    return (scale or architecture.head_size**-0.5) * rope.magnitude**2


def _latent_arguments(latent: LatentAttention, rope: Rope) -> dict[str, Any]:
    """MLATransformerConfig's arguments of latent attention, with YaRN's factors on cosines and sines (mscale over
    mscale_all_dim) and on the softmax (mscale_all_dim).

    The norms of the latent vectors take the layers' `rms_norm_eps`, as SGLang's do; transformers fixes theirs at 1e-6,
    which is what published models have for both.
    """
    numbers = {"factor": 1.0, **rope.numbers}
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain_size,
        "qk_pos_emb_head_dim": latent.rope_size,
        "v_head_dim": latent.v_size,
        "kv_channels": latent.v_size,
        "qk_layernorm": True,
        "rope_type": "rope" if rope.kind == "default" else rope.kind,
        "rotary_base": rope.base,
        "rotary_scaling_factor": numbers.pop("factor"),
        **numbers,
    }


def _expert_arguments(architecture: Architecture, parallel: Parallel) -> dict[str, Any]:
    """Return TransformerConfig's arguments of a mixture of experts; none of a dense model.

    The router softmaxes over all experts and keeps the largest probabilities, or (the same as dividing these by their
    sum) softmaxes over the largest logits. With a router's bias it takes sigmoids and divides them by their sum over
    the chosen experts. No token is dropped. `ModelRouting` adds losses and updates biases; Megatron does neither.
    """
    experts = architecture.experts
    written = architecture.family.experts
    if experts is None or written is None:
        return {}
    dense = experts.num_dense_layers
    layers = architecture.num_layers
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
        "moe_router_score_function": "sigmoid" if written.router_bias else "softmax",
        "moe_router_enable_expert_bias": written.router_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_size,
        "moe_shared_expert_gate": written.shared_gated,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def _pipeline_arguments(parallel: Parallel) -> dict[str, Any]:
    """Return TransformerConfig's arguments of pipeline stages."""
    interleaved = parallel.virtual_pipeline > 1
    return {
        "pipeline_model_parallel_size": parallel.pipeline,
        "pipeline_model_parallel_layout": _pipeline_layout(parallel),
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if interleaved else None,
        # Two stages of several chunks are each other's next and previous stage: in a batch their messages would cross.
        "batch_p2p_comm": not interleaved,
        # True by default, which has the host wait for the whole GPU at each message (megatron-core 0.16.1,
        # p2p_communication.py). torch's batch_isend_irecv needs it no more: its requests order themselves by streams.
        "batch_p2p_sync": False,
        "overlap_p2p_comm": interleaved,
        # gloo sends asynchronously: the tensor must outlive the call.
        "deallocate_pipeline_outputs": platform.has_cuda(),
    }


def _pipeline_layout(parallel: Parallel) -> list[list[str]] | None:
    """Return the modules of every chunk of every stage, where the config gives their numbers of layers."""
    if parallel.pipeline_split is None or parallel.pipeline == 1:
        return None
    chunks = [["decoder"] * layers for layers in parallel.pipeline_split]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def gpt_arguments(architecture: Architecture, tensor: int) -> dict[str, Any]:
    """Return GPTModel's keyword arguments besides the TransformerConfig: vocabulary, positions, tied embeddings.

    Args:
        tensor: tensor-parallel ranks, into which the vocabulary is padded to divide.
    """
    return {
        "vocab_size": padded_vocab_size(architecture.vocab_size, tensor),
        "max_sequence_length": architecture.max_positions,
        "share_embeddings_and_output_weights": architecture.ties_output,
        "position_embedding_type": "rope",
        "rotary_base": architecture.rope.base,
        "rotary_percent": architecture.rope.part,
    }
