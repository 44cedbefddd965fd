"""The value loss, squared and Huber, clipped and not, against a loop in Python floats."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_oracles import all_conventions, row_coefficients
from ragged import CASES, Case, cases

from megappo.config.schema import Critic
from megappo.ppo.conventions import PRESETS, Conventions
from megappo.ppo.losses import value_loss
from megappo.ppo.reductions import AGGREGATIONS, Normaliser


def loop_error(error: float, delta: float | None, factor: float) -> tuple[float, float]:
    """The loss of an error and its derivative."""
    if delta is None:
        return factor * error**2, 2 * factor * error
    if abs(error) <= delta:
        return error**2 / 2, error
    return delta * (abs(error) - delta / 2), math.copysign(delta, error)


@CASES
@given(
    cases(),
    st.none() | st.floats(0.05, 1.0),
    st.none() | st.floats(0.1, 2.0),
    st.none() | st.sampled_from(AGGREGATIONS),
    all_conventions(),
)
def test_value_loss_and_gradient_equal_a_loop(case: Case, value_clip, delta, mode, conventions: Conventions):
    values, old_values, returns = case.numbers().requires_grad_(), case.numbers(), case.numbers()
    config = Critic(value_clip=value_clip, huber_delta=delta, loss_agg_mode=mode)
    loss, metrics = value_loss(values, old_values, returns, case.mask, config, conventions=conventions)
    loss.backward()
    lengths = [int(row.sum()) for row in case.mask]
    coefficients = row_coefficients(lengths, mode or conventions.loss_agg_mode, case.shape[1])
    total, clipped_tokens, gradient = 0.0, 0, torch.zeros(case.shape)
    for i, t in case.tokens():
        v, old, target = float(values[i, t].detach()), float(old_values[i, t]), float(returns[i, t])
        clipped = v if value_clip is None else min(max(v, old - value_clip), old + value_clip)
        error, slope = loop_error(v - target, delta, conventions.value_loss_factor)
        clipped_error, _ = loop_error(clipped - target, delta, conventions.value_loss_factor)
        worse = clipped_error > error
        total += coefficients[i] * max(error, clipped_error)
        clipped_tokens += worse
        gradient[i, t] = 0.0 if worse else coefficients[i] * slope
    assert float(loss.detach()) == pytest.approx(total, rel=1e-6, abs=1e-6)
    assert float(metrics["vf_clipfrac"]) == pytest.approx(clipped_tokens / sum(lengths))
    torch.testing.assert_close(values.grad, gradient, rtol=1e-5, atol=1e-6)


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]])


@pytest.mark.parametrize(
    ("value_clip", "delta", "loss", "clipfrac"),
    [
        # value 1, old value 0, return 2: unclipped error 1, clipped to 0.5 error 1.5
        (0.5, None, 1.125, 1.0),
        (None, None, 0.5, 0.0),
        (2.0, None, 0.5, 0.0),
        (None, 0.5, 0.375, 0.0),
        (None, 10.0, 0.5, 0.0),
        (0.5, 0.5, 0.625, 1.0),
        (0.5, 1.0, 1.0, 1.0),
    ],
)
def test_value_loss_hand_computed(value_clip, delta, loss, clipfrac):
    config = Critic(value_clip=value_clip, huber_delta=delta)
    result, metrics = value_loss(one(1.0), one(0.0), one(2.0), one(1.0), config)
    assert (float(result), float(metrics["vf_clipfrac"])) == (loss, clipfrac)


def test_a_preset_scales_the_squared_error_and_not_hubers():
    arguments = (one(1.0), one(0.0), one(3.0), one(1.0))
    assert float(value_loss(*arguments, Critic(value_clip=None), conventions=PRESETS["slime"])[0]) == 4.0
    huber = Critic(value_clip=None, huber_delta=1.0)
    assert float(value_loss(*arguments, huber, conventions=PRESETS["slime"])[0]) == 1.5


@pytest.mark.parametrize("delta", [None, 0.5])
def test_only_values_get_a_gradient_and_nan_stays_behind_the_mask(delta):
    values = torch.tensor([[0.5, math.nan, 1e4]], requires_grad=True)
    other = torch.tensor([[0.0, math.nan, -1e4]], requires_grad=True)
    loss, metrics = value_loss(values, other, other, torch.tensor([[1.0, 0.0, 1.0]]), Critic(huber_delta=delta))
    loss.backward()
    assert loss.isfinite() and values.grad.isfinite().all() and metrics["vf_clipfrac"].isfinite()
    assert float(values.grad[0, 1]) == 0.0 and other.grad is None


def test_a_batch_without_tokens_gives_zero_and_a_gradient_of_zero():
    values = torch.ones(2, 3, requires_grad=True)
    loss, metrics = value_loss(values, values.detach(), torch.zeros(2, 3), torch.zeros(2, 3), Critic())
    loss.backward()
    assert (float(loss.detach()), float(metrics["vf_clipfrac"])) == (0.0, 0.0)
    assert torch.equal(values.grad, torch.zeros(2, 3))
    empty = torch.zeros(0, 3, requires_grad=True)
    normaliser = Normaliser(7, 2, 3)
    assert float(value_loss(empty, empty, empty, empty, Critic(), normaliser=normaliser)[0].detach()) == 0.0
