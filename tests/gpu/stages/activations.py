"""SwiGLU of an MLP's two halves, forward and backward: Megatron's compiled function, TransformerEngine's operation, and
the torch layers' own. Which of them is fastest with TransformerEngine is what this stage decides.

python tests/gpu/stages/activations.py
"""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import CUDA, DEVICE, measured, report, sized, timed
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

from megappo.models.layer_specs import swiglu

TOKENS, WIDTH = sized((8192, 2 * 8960), (5, 16))


def ways() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Name -> function of [TOKENS, 1, WIDTH]; TransformerEngine's where it is installed with CUDA."""
    found = {"megatron": lambda x: bias_swiglu_impl(x, None), "torch_layers": swiglu}
    if CUDA and importlib.util.find_spec("transformer_engine"):
        from transformer_engine.pytorch.ops import SwiGLU

        found["transformer_engine"] = SwiGLU()
    return found


def measure() -> dict:
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(TOKENS, 1, WIDTH, generator=generator, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    first, second = x.double().chunk(2, -1)
    expected = F.silu(first) * second
    (expected_gradient,) = torch.autograd.grad(expected.sum(), x)
    figures = {}
    for name, compute in ways().items():

        def both(compute: Callable[[torch.Tensor], torch.Tensor] = compute) -> tuple[torch.Tensor, torch.Tensor]:
            output = compute(x)
            return output, *torch.autograd.grad(output.sum(), x)

        figures[f"{name}_first_seconds"] = timed(both)[1]  # with what it compiles
        (output, gradient), figure = measured(both)
        torch.testing.assert_close(output.double(), expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(gradient, expected_gradient, rtol=2e-2, atol=2e-2)
        figures |= {f"{name}_{key}": value for key, value in figure.items()}
    return {"stage": "activations", **figures}


if __name__ == "__main__":
    report(measure)
