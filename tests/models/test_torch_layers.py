"""Norm and activation of the torch-only layers against their formulas, in float64: values and gradients."""

from types import SimpleNamespace

import pytest
import torch

from megappo.models.layer_specs import RMSNorm, swiglu

EPS, SIZE = 1e-3, 12
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}
of_each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers in dtype and in float64."""
    numbers = (3 * torch.randn(shape, dtype=torch.float64)).to(dtype)
    return numbers.clone().requires_grad_(), numbers.double().requires_grad_()


def check(found: torch.Tensor, expected: torch.Tensor, leaves: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    grad = torch.randn(found.shape, dtype=torch.float64).to(found.dtype)
    found.backward(grad)
    expected.backward(grad.double())
    for one, other in [(found, expected), *((mine.grad, exact.grad) for mine, exact in leaves)]:
        assert one.dtype == found.dtype
        difference = (one.double() - other).abs().max() / other.abs().max()
        assert difference < TOLERANCE[found.dtype]


@of_each_dtype
@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("shape", [(5, 1, SIZE), (3, 2, 4, SIZE), (0, 1, SIZE)])
def test_norm(shape: tuple[int, ...], adds_one: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=True, layernorm_zero_centered_gamma=adds_one)
    norm = RMSNorm(config, SIZE, EPS)
    (x, exact), (weight, exact_weight) = inputs(shape, dtype), inputs((SIZE,), dtype)
    norm.weight.data.copy_(weight.detach())
    found = norm(x)
    if not x.numel():
        found.sum().backward()
        assert found.shape == x.grad.shape == shape and not norm.weight.grad.any()
        return
    expected = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * (exact_weight + adds_one)
    check(found, expected, [(x, exact), (norm.weight, exact_weight)])
    assert norm.weight.sequence_parallel


@of_each_dtype
def test_swiglu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, exact = inputs((7, 1, 2 * SIZE), dtype)
    gate, up = exact[..., :SIZE], exact[..., SIZE:]
    check(swiglu(x), gate / (1 + (-gate).exp()) * up, [(x, exact)])
