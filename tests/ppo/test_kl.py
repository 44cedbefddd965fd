"""KL estimators against their formulae in Python floats, and the controllers' arithmetic."""

import math
from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_oracles import all_conventions, on_grid
from ragged import CASES, Case, cases

from megappo.config.sections import KLCtrl
from megappo.config.values import KLKind
from megappo.ppo.conventions import DEFAULT, KL_KINDS, PRESETS, Conventions
from megappo.ppo.kl import VERL_NAMES, KLController, kl_estimate

FORMULAE = {
    "k1": (lambda q: -q, lambda q: -1.0),
    "abs": (abs, lambda q: math.copysign(1.0, q) if q else 0.0),
    "k2": (lambda q: q * q / 2, lambda q: q),
    "k3": (lambda q: math.expm1(q) - q, lambda q: math.expm1(q)),
}
"""The estimate of q = ref_log_prob - log_prob and its derivative in q."""


def loop_estimate(q: float, kind: str, conventions: Conventions) -> tuple[float, float]:
    """The estimate and its derivative in log_prob, clamped as the conventions set."""
    value_of, slope_of = FORMULAE[kind.removesuffix("+")]
    on = kind in conventions.kl_clamped
    low = conventions.kl_input_clamp if on and conventions.kl_input_clamp is not None else math.inf
    high = conventions.kl_output_clamp if on and conventions.kl_output_clamp is not None else math.inf
    bounded = min(max(q, -low), low)
    value = value_of(bounded)
    slope = -slope_of(bounded) + (value if conventions.kl_true_gradient else 0.0)
    slope = 0.0 if abs(q) > low or abs(value) > high else slope
    return min(max(value, -high), high), -q if kind.endswith("+") else slope


@pytest.mark.parametrize("kind", KL_KINDS)
@CASES
@given(cases(), all_conventions(), st.sampled_from([0.1, 1.0, 8.0]))
def test_estimators_and_their_gradients_equal_a_loop(kind: str, case: Case, conventions: Conventions, scale: float):
    ref_log_probs = on_grid(case.numbers(scale))
    log_probs = (ref_log_probs + on_grid(case.numbers(scale))).requires_grad_()
    estimate = kl_estimate(log_probs, ref_log_probs, kind, conventions=conventions)
    estimate.sum().backward()
    for i, t in case.tokens():
        q = float(ref_log_probs[i, t]) - float(log_probs[i, t].detach())
        value, slope = loop_estimate(q, kind, conventions)
        assert float(estimate[i, t].detach()) == pytest.approx(value, rel=1e-6, abs=1e-6)
        assert float(log_probs.grad[i, t]) == pytest.approx(slope, rel=1e-6, abs=1e-6)


def test_k3_is_clamped_and_stays_finite():
    estimate = kl_estimate(torch.tensor([-100.0, 0.0, -5.0]), torch.tensor([0.0, -100.0, 0.0]), "k3")
    # e^20 - 21 -> 10; e^-20 - 1 + 20 = 19 -> 10; e^5 - 6 = 142 -> 10
    assert estimate.tolist() == [10.0, 10.0, 10.0]
    assert float(kl_estimate(torch.tensor(0.0), torch.tensor(1.0), "k3")) == pytest.approx(math.e - 2)


@pytest.mark.parametrize("conventions", [DEFAULT, *PRESETS.values(), Conventions(kl_clamped=frozenset())])
@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("q", [-1e4, 1e4])
def test_extremes_are_finite_in_value_and_gradient(kind: str, q: float, conventions: Conventions):
    log_probs = torch.tensor(0.0, requires_grad=True)
    estimate = kl_estimate(log_probs, torch.tensor(q), kind, conventions=conventions)
    estimate.backward()
    assert estimate.isfinite() and log_probs.grad.isfinite()


def test_k3_is_accurate_for_nearly_equal_policies():
    """e^q - 1 - q in float32 would round to 0 or noise: q^2 / 2 = 5e-9."""
    assert float(kl_estimate(torch.tensor(0.0), torch.tensor(1e-4), "k3")) == pytest.approx(5e-9, rel=2e-2)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("k1", -1.0, 1.0),
        ("abs", 1.0, -1.0),
        ("k2", 0.5, -1.0),
        ("k3", math.e - 2, 1.0 - math.e),
        ("k1+", -1.0, -1.0),
        ("k3+", math.e - 2, -1.0),
    ],
)
def test_values_and_gradients_at_q_1(kind: str, value: float, gradient: float):
    log_probs = torch.zeros(1, requires_grad=True)
    estimate = kl_estimate(log_probs, torch.ones(1), kind)
    estimate.sum().backward()
    assert (float(estimate.detach()), float(log_probs.grad)) == (pytest.approx(value), pytest.approx(gradient))


def test_estimators_agree_with_the_true_kl_in_expectation():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
    true_kl = float((policy.exp() * (policy - reference)).sum())
    for kind in ("k1", "k3", "k1+", "k3+"):
        assert float((policy.exp() * kl_estimate(policy, reference, kind)).sum()) == pytest.approx(true_kl, rel=1e-5)


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
def test_the_expected_gradient_of_the_straight_through_estimators_is_that_of_the_kl(kind: str):
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
    policy = logits.log_softmax(0)
    (true_gradient,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    estimate = (policy.detach().exp() * kl_estimate(policy, reference, kind)).sum()
    torch.testing.assert_close(torch.autograd.grad(estimate, logits)[0], true_gradient)


def nemo_rl_kl(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str, low: float | None, high: float | None
) -> torch.Tensor:
    """NeMo-RL's calculate_kl as its ClippedPGLossFn calls it, written down from there."""
    weights = torch.exp(log_probs - log_probs.detach())
    log_ratio = ref_log_probs - log_probs
    if low is not None:
        clamped = log_ratio.clamp(min=-low, max=low)
        weights = torch.where(log_ratio == clamped, weights, weights.detach())
        log_ratio = clamped
    found = {"k1": -log_ratio, "k2": log_ratio.square() / 2, "k3": torch.exp(log_ratio) - 1 - log_ratio}[kind]
    found = weights * found
    return found if high is None else found.clamp(min=-high, max=high)


def value_and_gradient(estimate: Callable[..., torch.Tensor], q: torch.Tensor, *rest) -> tuple[torch.Tensor, ...]:
    log_probs = torch.full_like(q, -3.0, requires_grad=True)
    found = estimate(log_probs, q - 3.0, *rest)
    found.sum().backward()
    return found.detach(), log_probs.grad


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_preset_nemo_rl_has_nemo_rls_kl_and_its_gradient(kind: str):
    q = torch.linspace(-30.0, 30.0, 1201, dtype=torch.float64)
    ours = value_and_gradient(partial(kl_estimate, conventions=PRESETS["nemo_rl"]), q, kind)
    for found, expected in zip(ours, value_and_gradient(nemo_rl_kl, q, kind, 20.0, 10.0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_k3_with_the_true_gradient_is_k3_plus_where_no_clamp_holds():
    q = torch.linspace(-9.0, 2.3, 1001, dtype=torch.float64)
    for found, expected in zip(
        value_and_gradient(kl_estimate, q, "k3+"), value_and_gradient(nemo_rl_kl, q, "k3", 20.0, 10.0), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_expected_true_gradient_is_that_of_the_kl(kind: str):
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
    policy = logits.log_softmax(0)
    (true_gradient,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    for conventions, is_true in ((PRESETS["nemo_rl"], True), (DEFAULT, False)):
        estimate = (policy.detach().exp() * kl_estimate(policy, reference, kind, conventions=conventions)).sum()
        (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        assert torch.allclose(gradient, true_gradient) == is_true


@pytest.mark.parametrize("kind", ["k4", "k2+", ""])
def test_unknown_kind_lists_the_valid_ones(kind: str):
    with pytest.raises(ValueError, match=r"unknown KL estimator '.*': choose one of k1, abs, k2, k3, k1\+, k3\+;"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind)


@pytest.mark.parametrize(("kind", "name"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_verl_names_are_understood(kind: str, name: str):
    log_probs, ref_log_probs = torch.tensor([-1.0, -30.0]), torch.tensor([-1.5, -2.0])
    assert torch.equal(kl_estimate(log_probs, ref_log_probs, name), kl_estimate(log_probs, ref_log_probs, kind))


def test_the_config_takes_every_kind():
    assert set(get_args(KLKind)) == {*KL_KINDS, *VERL_NAMES, "full"}


def test_full_is_refused_by_name():
    with pytest.raises(ValueError, match="'full': .* full vocabulary .* model's head computes it"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "full")


@pytest.mark.parametrize(("current_kl", "factor"), [(0.1, 1.0), (0.11, 1.01), (10.0, 1.02), (0.0, 0.98), (0.09, 0.99)])
def test_adaptive_controller_follows_the_formula(current_kl: float, factor: float):
    controller = KLController(KLCtrl(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=1000))
    controller.update(current_kl, n_steps=100)
    assert controller.value == pytest.approx(0.5 * factor)


def test_adaptive_controller_refuses_nan():
    with pytest.raises(FloatingPointError, match="KL to the reference is nan"):
        KLController(KLCtrl(type="adaptive")).update(math.nan, 1)


def test_checkpoint_restores_the_adaptive_value_and_leaves_the_fixed_one_to_the_config():
    adaptive = KLController(KLCtrl(type="adaptive", kl_coef=0.2, horizon=10, target_kl=0.1))
    adaptive.update(1.0, 5)
    restored = KLController(KLCtrl(type="adaptive", kl_coef=0.2, horizon=10, target_kl=0.1))
    restored.load_state_dict(adaptive.state_dict())
    assert restored.value == adaptive.value == pytest.approx(0.22)
    fixed = KLController(KLCtrl(kl_coef=0.3))
    fixed.update(1.0, 5)
    fixed.load_state_dict(adaptive.state_dict())
    assert fixed.value == 0.3
