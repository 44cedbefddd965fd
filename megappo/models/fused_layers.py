"""Norm and activation of the torch-only layers, each one autograd function that passes over memory few times.

torch's own make a tensor for each operation of the formula and for each of its gradient, which on a CPU takes longer
than what is computed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, its weight marked so that Megatron sums its gradient over sequence shards."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size], of any floating dtype."""
        if x.is_cuda:  # torch has a fused kernel there
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """y = x s w with s = (mean(x^2) + eps)^-1/2, so dx = s (g w) - x s^3 mean(g w x) and dw = sum of g x s."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scale = norm.square().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (exact * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        exact, exact_weight = x.to(scale.dtype), weight.to(scale.dtype)
        products = (grad * exact).flatten(0, -2)
        grad_weight = scale.flatten() @ products
        mean = (products @ exact_weight).view_as(scale) / x.shape[-1]
        grad_x = (grad * exact_weight).mul_(scale).addcmul_(exact, scale.pow(3) * mean, value=-1)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, an MLP's activation: [..., 2 x size] -> [..., size]."""
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
