"""KL estimators against their formulae in Python floats, and the controllers' arithmetic."""

import math

import pytest
import torch
from hypothesis import given
from ragged import CASES, Case, cases

from megappo.config.schema import KLCtrl
from megappo.ppo.kl import KINDS, AdaptiveKLController, FixedKLController, kl_controller, kl_estimate

FORMULAE = {
    "k1": lambda q: -q,
    "abs": abs,
    "k2": lambda q: q * q / 2,
    "k3": lambda q: math.exp(min(max(q, -20.0), 20.0)) - 1 - min(max(q, -20.0), 20.0),
}


@CASES
@given(cases())
def test_estimators_equal_their_formulae(case: Case):
    log_probs, ref_log_probs = case.numbers(), case.numbers()
    assert set(FORMULAE) == set(KINDS)
    for kind, formula in FORMULAE.items():
        estimate = kl_estimate(log_probs, ref_log_probs, kind)
        for i, t in case.tokens():
            expected = formula(float(ref_log_probs[i, t]) - float(log_probs[i, t]))
            expected = min(expected, 10.0) if kind == "k3" else expected
            assert float(estimate[i, t]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_k3_is_clamped_and_stays_finite():
    estimate = kl_estimate(torch.tensor([-100.0, 0.0, -5.0]), torch.tensor([0.0, -100.0, 0.0]), "k3")
    # e^20 - 21 -> 10; e^-20 - 1 + 20 = 19 -> 10; e^5 - 6 = 142 -> 10
    assert estimate.tolist() == [10.0, 10.0, 10.0]
    assert float(kl_estimate(torch.tensor(0.0), torch.tensor(1.0), "k3")) == pytest.approx(math.e - 2)


def test_k3_is_accurate_for_nearly_equal_policies():
    """e^q - 1 - q in float32 would round to 0 or noise: q^2 / 2 = 5e-9."""
    assert float(kl_estimate(torch.tensor(0.0), torch.tensor(1e-4), "k3")) == pytest.approx(5e-9, rel=2e-2)


@pytest.mark.parametrize(
    ("kind", "gradient"), [("k1", 1.0), ("abs", -1.0), ("k2", -1.0), ("k3", 1.0 - math.e)], ids=lambda x: str(x)
)
def test_gradients_at_q_1(kind: str, gradient: float):
    log_probs = torch.zeros(1, requires_grad=True)
    kl_estimate(log_probs, torch.ones(1), kind).sum().backward()
    assert float(log_probs.grad) == pytest.approx(gradient)


def test_estimators_agree_with_the_true_kl_in_expectation():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.4, 0.4, 0.2]).log()
    true_kl = float((policy.exp() * (policy - reference)).sum())
    for kind in ("k1", "k3"):
        assert float((policy.exp() * kl_estimate(policy, reference, kind)).sum()) == pytest.approx(true_kl, rel=1e-5)


def test_unknown_kind_lists_the_valid_ones():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4': choose one of k1, abs, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize(("current_kl", "factor"), [(0.1, 1.0), (0.11, 1.01), (10.0, 1.02), (0.0, 0.98), (0.09, 0.99)])
def test_adaptive_controller_follows_the_formula(current_kl: float, factor: float):
    controller = AdaptiveKLController(init_kl_coef=0.5, target_kl=0.1, horizon=1000)
    controller.update(current_kl, n_steps=100)
    assert controller.value == pytest.approx(0.5 * factor)


def test_adaptive_controller_refuses_nan():
    with pytest.raises(ValueError, match="KL to the reference is nan"):
        AdaptiveKLController(0.5, 0.1, 1000).update(math.nan, 1)


def test_checkpoint_restores_the_adaptive_value_and_leaves_the_fixed_one_to_the_config():
    adaptive = kl_controller(KLCtrl(type="adaptive", kl_coef=0.2, horizon=10, target_kl=0.1))
    adaptive.update(1.0, 5)
    restored = kl_controller(KLCtrl(type="adaptive", kl_coef=0.2, horizon=10, target_kl=0.1))
    restored.load_state_dict(adaptive.state_dict())
    assert restored.value == adaptive.value == pytest.approx(0.22)
    fixed = kl_controller(KLCtrl(kl_coef=0.3))
    assert isinstance(fixed, FixedKLController)
    fixed.update(1.0, 5)
    fixed.load_state_dict(adaptive.state_dict())
    assert fixed.value == 0.3
