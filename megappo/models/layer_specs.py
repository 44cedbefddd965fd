"""Modules of a transformer layer: TransformerEngine's, or torch-only ones that also run on a CPU. The latter replace
those that Megatron has none of, or none for packed batches and sequence parallelism."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megappo.config.config_error import ConfigError
from megappo.models.packed_attention import PackedAttention, SelfAttention
from megappo.runtime import platform


def layer_kind(wanted: str) -> str:
    """Return the library of the layers, "torch" or "transformer_engine".

    Args:
        wanted: model.layer_spec: "torch", "transformer_engine", or "auto", which takes the latter where it is installed
            with CUDA.
    Raises:
        ConfigError: "transformer_engine" is wanted and cannot run here; or it is installed and cannot be imported.
    """
    if wanted == "torch" or (wanted == "auto" and not platform.has_transformer_engine()):
        return "torch"
    if not platform.has_transformer_engine():
        raise ConfigError(
            "model.layer_spec is transformer_engine, but TransformerEngine is not installed or CUDA is missing: "
            "install transformer-engine, or set model.layer_spec=torch"
        )
    if not HAVE_TE:  # megatron-core would build its layers of mocks
        raise ConfigError(
            f"model.layer_spec is {wanted}, but TransformerEngine is installed and cannot be imported "
            f"({platform.fault('transformer-engine')}): build it again, see docs/troubleshooting.md, or "
            "set model.layer_spec=torch"
        )
    return "transformer_engine"


def layer_spec(config: TransformerConfig, has_te: bool, stage: int, chunk: int) -> TransformerBlockSubmodules:
    """The decoder of one chunk of a pipeline stage, as GPTModel's `transformer_layer_spec`. The component's groups are
    active.

    Args:
        has_te: the layers are TransformerEngine's.
        stage, chunk: pipeline rank and the chunk's index on it, which give the number of layers.
    """
    decoder = get_gpt_decoder_block_spec(
        config, use_transformer_engine=has_te, normalization="RMSNorm", vp_stage=chunk, pp_rank=stage
    )
    if not has_te:
        decoder.layer_norm = RMSNorm
        for layer in decoder.layer_specs:
            _use_torch_modules(layer.submodules, config)
    return decoder


def _use_torch_modules(layer: TransformerLayerSubmodules, config: TransformerConfig) -> None:
    """Replace modules of Megatron's local layer: those that refuse sequence parallelism and packs, or are slow."""
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention
    attention.module = LatentSelfAttention if config.multi_latent_attention else SelfAttention
    attention.submodules.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.submodules.q_layernorm = RMSNorm
        key_norm = "kv_layernorm" if config.multi_latent_attention else "k_layernorm"
        setattr(attention.submodules, key_norm, RMSNorm)
    mlp = layer.mlp.submodules
    parts = [mlp.experts.submodules, mlp.shared_experts.submodules] if hasattr(mlp, "experts") else [mlp]
    for part in parts:
        part.activation_func = swiglu


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, its weight marked so that Megatron sums its gradient over sequence shards."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Return silu(gate) * up, an MLP's activation: [..., 2 x size] -> [..., size].

    It keeps `gate_and_up` alone for the backward pass; torch's operations would keep silu(gate), too.
    """
    return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        grads = torch.empty_like(gate_and_up)
        grad_gate, grad_up = grads.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grads


class ReplicatedLinear(torch.nn.Module):
    """A linear map that every tensor-parallel rank has whole, and applies to its own tokens.

    It stands in for Megatron's ColumnParallelLinear where TransformerEngine has a "duplicated" TELinear.
    """

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees its own tokens: Megatron then sums the gradient over them.
        self.weight.sequence_parallel = config.sequence_parallel
        config.init_method(self.weight)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[..., inputs] -> [..., outputs], and None: there is no bias to add."""
        return F.linear(hidden, self.weight), None


class LatentSelfAttention(MLASelfAttention):
    """Megatron's multi-head latent attention, with the maps to latent vectors whole on every tensor-parallel rank.

    Without TransformerEngine Megatron cuts them and gathers their outputs. Each rank would then keep only its own
    heads' part of the gradient of the rotary key, which all heads share.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        latent_and_rope = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, latent_and_rope, config)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
