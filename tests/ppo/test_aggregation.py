"""Aggregation modes against loops; entropy and KL losses, which are little more."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_oracles import all_conventions, row_coefficients
from ragged import CASES, Case, cases

from megappo.config.schema import Actor
from megappo.ppo.conventions import DEFAULT, KL_KINDS, PRESETS, Conventions
from megappo.ppo.kl import kl_estimate
from megappo.ppo.losses import entropy_loss, kl_loss
from megappo.ppo.reductions import AGGREGATIONS, Normaliser, aggregate

MODES = st.sampled_from(AGGREGATIONS)


def coefficients(case: Case, mode: str) -> torch.Tensor:
    """[B, R] float64: what each token counts in the aggregate."""
    lengths = [int(row.sum()) for row in case.mask]
    rows = row_coefficients(lengths, mode, case.shape[1])
    return torch.tensor(rows, dtype=torch.float64)[:, None] * case.mask.double()


@CASES
@given(cases(), MODES)
def test_aggregate_and_its_gradient_equal_a_loop(case: Case, mode: str):
    loss = case.numbers().requires_grad_()
    result = aggregate(loss, case.mask, mode)
    result.backward()
    weights = coefficients(case, mode)
    total = sum(float(weights[i, t]) * float(loss[i, t].detach()) for i, t in case.tokens())
    assert result.dtype == torch.float32
    assert float(result.detach()) == pytest.approx(total, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(loss.grad, weights.float(), rtol=1e-6, atol=0)


def test_aggregate_hand_computed():
    loss = torch.tensor([[1.0, 2.0, 9.0, 9.0], [4.0, 9.0, 6.0, 5.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    results = {mode: float(aggregate(loss, mask, mode)) for mode in AGGREGATIONS}
    # Sequence sums 3 and 15, lengths 2 and 3; the row without a token is no sequence.
    assert results == {
        "token-mean": pytest.approx(18 / 5),
        "token-sum": pytest.approx(18.0),
        "seq-mean-token-sum": pytest.approx(9.0),
        "seq-mean-token-mean": pytest.approx((1.5 + 5.0) / 2),
        "seq-mean-token-sum-norm": pytest.approx(9.0 / 4),
    }
    given_counts = Normaliser(num_tokens=10, num_sequences=4, max_length=8)
    results = {mode: float(aggregate(loss, mask, mode, normaliser=given_counts)) for mode in AGGREGATIONS}
    assert results == {
        "token-mean": pytest.approx(18 / 10),
        "token-sum": pytest.approx(18.0),
        "seq-mean-token-sum": pytest.approx(18 / 4),
        "seq-mean-token-mean": pytest.approx(6.5 / 4),
        "seq-mean-token-sum-norm": pytest.approx(18 / 4 / 8),
    }
    results = {mode: float(aggregate(loss, mask, mode, loss_weights=torch.tensor([3.0, 0.5, 9.0]))) for mode in results}
    assert results == {
        "token-mean": pytest.approx((3 * 3 + 15 / 2) / 5),
        "token-sum": pytest.approx(3 * 3 + 15 / 2),
        "seq-mean-token-sum": pytest.approx((3 * 3 + 15 / 2) / 2),
        "seq-mean-token-mean": pytest.approx((3 * 1.5 + 5.0 / 2) / 2),
        "seq-mean-token-sum-norm": pytest.approx((3 * 3 + 15 / 2) / 2 / 4),
    }


def test_the_normaliser_of_a_mask_counts_tokens_and_rows_that_have_some():
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert Normaliser.of(mask) == Normaliser(num_tokens=3, num_sequences=2, max_length=3)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
def test_no_token_gives_zero_and_a_gradient_of_zero(mode: str, shape: tuple[int, int]):
    loss = torch.full(shape, math.nan, requires_grad=True)
    result = aggregate(loss, torch.zeros(shape), mode)
    result.backward()
    assert float(result.detach()) == 0.0
    assert torch.equal(loss.grad, torch.zeros(shape))


def test_unknown_aggregation_lists_the_valid_ones():
    with pytest.raises(
        ValueError, match="unknown loss_agg_mode 'sum': choose one of token-mean, token-sum, seq-mean-token-sum"
    ):
        aggregate(torch.ones(1, 1), torch.ones(1, 1), "sum")


@CASES
@given(cases(), st.none() | MODES, st.floats(0.0, 2.0), all_conventions())
def test_entropy_loss_equals_a_loop(case: Case, mode: str | None, coefficient: float, conventions: Conventions):
    entropy = case.numbers().abs().requires_grad_()
    config = Actor(entropy_coeff=coefficient, loss_agg_mode=mode)
    loss, metrics = entropy_loss(entropy, case.mask, config, conventions=conventions)
    loss.backward()
    weights = coefficients(case, mode or conventions.loss_agg_mode)
    values = [(float(weights[i, t]), float(entropy[i, t].detach())) for i, t in case.tokens()]
    total = -coefficient * sum(weight * value for weight, value in values)
    assert float(loss.detach()) == pytest.approx(total, rel=1e-6, abs=1e-6)
    assert float(metrics["entropy"]) == pytest.approx(sum(value for _, value in values) / len(values), rel=1e-6)
    torch.testing.assert_close(entropy.grad.double(), -coefficient * weights, rtol=1e-6, atol=1e-9)


def test_entropy_loss_rewards_entropy():
    entropy = torch.tensor([[1.0, 3.0, math.nan]], requires_grad=True)
    loss, metrics = entropy_loss(entropy, torch.tensor([[1.0, 1.0, 0.0]]), Actor(entropy_coeff=0.1))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.2)
    assert metrics == {"entropy": torch.tensor(2.0)}
    torch.testing.assert_close(entropy.grad, torch.tensor([[-0.05, -0.05, 0.0]]))


@CASES
@given(cases(), st.sampled_from(KL_KINDS), st.none() | MODES, all_conventions(), st.sampled_from([0.1, 3.0]))
def test_kl_loss_is_the_aggregated_estimate(case: Case, kind: str, mode: str | None, conventions, scale: float):
    log_probs, ref_log_probs = case.numbers(scale).requires_grad_(), case.numbers(scale)
    config = Actor(kl_loss_coef=0.3, kl_loss_type=kind, loss_agg_mode=mode)
    loss, metrics = kl_loss(log_probs, ref_log_probs, case.mask, config, conventions=conventions)
    loss.backward()
    again = log_probs.detach().requires_grad_()
    # The estimate itself is compared with its formula in test_kl.py.
    estimate = kl_estimate(again, ref_log_probs, kind, conventions=conventions).double()
    weights = coefficients(case, mode or conventions.loss_agg_mode)
    total = sum(weights[i, t] * estimate[i, t] for i, t in case.tokens())
    total.backward()
    assert float(metrics["kl_loss"]) == pytest.approx(float(total.detach()), rel=1e-6, abs=1e-6)
    assert float(loss.detach()) == pytest.approx(0.3 * float(total.detach()), rel=1e-6, abs=1e-6)
    torch.testing.assert_close(log_probs.grad, 0.3 * again.grad, rtol=1e-5, atol=1e-6)


def test_a_kl_that_is_given_replaces_the_estimate():
    log_probs, kl = torch.zeros(1, 2, requires_grad=True), torch.tensor([[2.0, math.nan]], requires_grad=True)
    config, mask = Actor(kl_loss_coef=0.5, kl_loss_type="full"), torch.tensor([[1.0, 0.0]])
    loss, metrics = kl_loss(log_probs, log_probs, mask, config, kl=kl)
    loss.backward()
    assert (float(loss.detach()), float(metrics["kl_loss"])) == (1.0, 2.0)
    assert torch.equal(kl.grad, torch.tensor([[0.5, 0.0]])) and log_probs.grad is None
    with pytest.raises(ValueError, match="full vocabulary"):
        kl_loss(log_probs, log_probs, mask, config)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_unbiased_kl_loss_has_the_gradient_of_the_kl_under_the_old_policy(kind: str):
    """Over all tokens of a small vocabulary, each as often as the old policy draws it."""
    logits = torch.tensor([0.3, -0.5, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    ref = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    log_probs = logits.log_softmax(0)
    drawn = torch.repeat_interleave(torch.arange(4), (old * 10).round().long())[None]
    config, mask = Actor(kl_loss_type=kind, kl_loss_coef=1.0, kl_loss_unbiased=True), torch.ones(1, 10)
    inputs = (log_probs[drawn], ref[drawn], mask)
    loss, _ = kl_loss(*inputs, config, old_log_probs=old.log()[drawn])
    exact = (log_probs.exp() * (log_probs - ref)).sum()
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=1e-6)
    [found] = torch.autograd.grad(loss, logits, retain_graph=True)
    [expected] = torch.autograd.grad(exact, logits, retain_graph=True)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    biased, _ = kl_loss(*inputs, config.model_copy(update={"kl_loss_unbiased": False}))
    assert not torch.allclose(torch.autograd.grad(biased, logits)[0], expected, atol=1e-3)
    with pytest.raises(ValueError, match="kl_loss_unbiased needs old_log_probs"):
        kl_loss(*inputs, config)


def test_the_unbiased_kl_loss_keeps_nan_behind_the_mask_out():
    log_probs = torch.tensor([[-1.0, math.nan]], requires_grad=True)
    old, mask = torch.tensor([[-1.5, math.nan]]), torch.tensor([[1.0, 0.0]])
    loss, _ = kl_loss(log_probs, 2 * old, mask, Actor(kl_loss_unbiased=True, kl_loss_coef=1.0), old_log_probs=old)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.exp(0.5) * (math.exp(-2.0) - 1 + 2.0))
    assert log_probs.grad[0, 1] == 0


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("conventions", [DEFAULT, *PRESETS.values()])
def test_kl_loss_keeps_nan_behind_the_mask_and_extremes_finite(kind: str, conventions: Conventions):
    log_probs = torch.tensor([[math.nan, -1e4, 0.0, 1.0]], requires_grad=True)
    ref_log_probs = torch.tensor([[math.inf, 0.0, -1e4, 2.0]], requires_grad=True)
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    loss, _ = kl_loss(log_probs, ref_log_probs, mask, Actor(kl_loss_type=kind), conventions=conventions)
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all() and ref_log_probs.grad is None
    assert float(log_probs.grad[0, 0]) == 0.0
    assert float(kl_loss(log_probs, log_probs, torch.zeros(1, 4), Actor(kl_loss_type=kind))[0].detach()) == 0.0
