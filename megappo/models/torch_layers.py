"""Modules of the torch-only layers that Megatron has none of, or none for packed batches and sequence parallelism."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, its weight marked so that Megatron sums its gradient over sequence shards."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, an MLP's activation: [..., 2 x size] -> [..., size].

    It keeps `gate_and_up` alone for the backward pass; torch's operations would keep silu(gate), too.
    """
    return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
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

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
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
