"""Losses of value heads with several outputs, and the values of these, against loops in float64."""

import math
from functools import partial

import pytest
import torch
import value_oracles
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.config.methods import VALUE_LOSSES, ValueLoss
from megappo.config.schema import Critic
from megappo.ppo.losses import value_loss
from megappo.ppo.value_losses import ERRORS, ValueInputs, token_errors, values_of

ORACLES = {
    "hl_gauss": lambda config, centers: partial(value_oracles.hl_gauss, centers=centers, width=config.hl_gauss_width),
    "two_hot": lambda config, centers: partial(value_oracles.two_hot, centers=centers),
    "quantile": lambda config, centers: partial(value_oracles.quantile, kappa=config.huber_delta),
}


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=25, deadline=None)
@given(st.integers(2, 60), st.floats(-2, 2), st.floats(0.1, 5), st.floats(0.3, 3), st.integers(0, 2**31))
def test_losses_and_gradients_equal_loops(name: str, bins: int, low: float, length: float, free: float, seed: int):
    keys = {"hl_gauss": {"hl_gauss_width": free}, "quantile": {"huber_delta": free}}.get(name, {})
    config = Critic(value_loss=name, **keys)
    generator = torch.Generator().manual_seed(seed)
    centers = torch.empty(0) if name == "quantile" else torch.linspace(low, low + length, bins)
    outputs = torch.randn(2, 3, bins, generator=generator).mul(2).requires_grad_()
    returns = low + length * (1.4 * torch.rand(2, 3, generator=generator) - 0.2)  # some are outside of the classes
    found = token_errors(ValueInputs(outputs, returns, centers), config)
    found[ERRORS].sum().backward()
    oracle = ORACLES[name](config, centers.double().tolist())
    for i in range(2):
        for t in range(3):
            numbers = outputs[i, t].detach().double().tolist()
            loss, gradient = oracle(numbers, float(returns[i, t]))
            assert float(found[ERRORS][i, t].detach()) == pytest.approx(loss, rel=2e-5, abs=1e-5)
            torch.testing.assert_close(
                outputs.grad[i, t].double(), torch.tensor(gradient).double(), rtol=1e-4, atol=2e-5
            )
            probs = [1 / bins] * bins if name == "quantile" else value_oracles.softmax(numbers)
            points = numbers if name == "quantile" else centers.tolist()
            mean = sum(p * x for p, x in zip(probs, points, strict=True))
            spread = math.sqrt(sum(p * (x - mean) ** 2 for p, x in zip(probs, points, strict=True)))
            assert float(values_of(outputs, centers)[i, t].detach()) == pytest.approx(mean, rel=1e-4, abs=1e-5)
            assert float(found["vf_std"][i, t]) == pytest.approx(spread, rel=1e-3, abs=1e-4)


def test_metrics_of_the_distribution_are_hand_computed():
    """Four equally likely classes; the second return is half a class beyond the last, the third further."""
    centers, returns = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([1.5, 3.5, 3.6, -0.6])
    found = token_errors(ValueInputs(torch.zeros(4, 4), returns, centers), Critic(value_loss="two_hot"))
    assert found["vf_outside"].tolist() == [0, 0, 1, 1]
    assert found["vf_entropy"].tolist() == pytest.approx([math.log(4)] * 4)
    assert found["vf_std"].tolist() == pytest.approx([math.sqrt(1.25)] * 4)
    quantiles = token_errors(ValueInputs(torch.zeros(1, 3), torch.ones(1)), Critic(value_loss="quantile"))
    assert quantiles.keys() == {ERRORS, "vf_std"}


@pytest.mark.parametrize("share", [0.1, 0.8])
@pytest.mark.parametrize("name", ORACLES)
def test_the_value_that_minimises_a_loss_is_the_mean_of_scores_of_0_and_1(name: str, share: float):
    """By the keys' defaults."""
    config = Critic(value_loss=name, value_range=None if name == "quantile" else (0.0, 1.0))
    centers = torch.empty(0) if name == "quantile" else torch.linspace(0, 1, config.value_bins)
    outputs = torch.zeros(config.value_bins, requires_grad=True)
    optimizer = torch.optim.Adam([outputs], lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.001, total_iters=600)
    weights = torch.tensor([1 - share, share])
    for _ in range(600):
        optimizer.zero_grad()
        errors = token_errors(ValueInputs(outputs.expand(2, -1), torch.tensor([0.0, 1.0]), centers), config)[ERRORS]
        (errors @ weights).backward()
        optimizer.step()
        schedule.step()
    assert float(values_of(outputs.detach(), centers)) == pytest.approx(share, abs=0.01)


def test_token_losses_of_a_head_are_averaged_as_they_are():
    ones, errors = torch.ones(1, 2), torch.tensor([[1.0, 4.0]], requires_grad=True)
    loss, metrics = value_loss(ones, ones, ones, ones, Critic(value_loss="hl_gauss"), errors=errors)
    assert float(loss.detach()) == 2.5 and not metrics


def test_a_loss_of_an_extension_is_used(monkeypatch: pytest.MonkeyPatch):
    entry = ValueLoss(lambda inputs, config: (inputs.outputs[..., 0] - inputs.returns).abs())
    monkeypatch.setitem(VALUE_LOSSES, "absolute", entry)
    values, old, returns = torch.tensor([[1.0, 5.0]]), torch.zeros(1, 2), torch.tensor([[3.0, 6.0]])
    loss, metrics = value_loss(values, old, returns, torch.ones(1, 2), Critic(value_loss="absolute"))
    assert float(loss) == 1.5 and float(metrics["vf_clipfrac"]) == 0, "it does not read value_clip"


def test_huber_delta_alone_chooses_huber_as_before_value_loss_was_a_key():
    assert Critic().value_loss == "mse"
    assert Critic(huber_delta=None).value_loss == "mse"
    assert Critic(huber_delta=0.5).value_loss == "huber"
    assert Critic(huber_delta=0.5, value_loss="quantile").value_loss == "quantile"
