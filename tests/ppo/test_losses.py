"""Losses, gradients and metrics against token loops in Python floats; and that cutting a batch changes nothing."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import CASES, Case, actors, cases

from megappo.config.schema import Actor, Critic
from megappo.ppo.losses import POLICY_LOSSES, aggregate, entropy_loss, policy_loss, value_loss


def loop_policy_loss(case: Case, log_probs, old_log_probs, advantages, config: Actor, weights):
    """Mean loss, its gradient to log_probs, and metrics, token by token."""
    low = config.clip_ratio_low or config.clip_ratio
    high = config.clip_ratio_high or config.clip_ratio
    totals = {"loss": 0.0, "pg_clipfrac": 0.0, "pg_clipfrac_lower": 0.0, "ppo_kl": 0.0}
    gradient = torch.zeros(case.shape)
    n = len(case.tokens())
    for i, t in case.tokens():
        log_ratio = float(log_probs[i, t]) - float(old_log_probs[i, t])
        a, w, ratio = float(advantages[i, t]), float(weights[i, t]), math.exp(min(max(log_ratio, -20.0), 20.0))
        clipped_ratio = min(max(ratio, 1 - low), 1 + high)
        objective = min(ratio * a, clipped_ratio * a)
        slope = ratio * a if ratio * a <= clipped_ratio * a and abs(log_ratio) <= 20 else 0.0
        totals["pg_clipfrac"] += clipped_ratio * a < ratio * a
        if config.clip_ratio_c is not None and a < 0 and objective < config.clip_ratio_c * a:
            objective, slope = config.clip_ratio_c * a, 0.0
            totals["pg_clipfrac_lower"] += 1
        totals["loss"] -= objective * w
        totals["ppo_kl"] -= min(max(log_ratio, -20.0), 20.0)
        gradient[i, t] = -slope * w / n
    return {name: total / n for name, total in totals.items()}, gradient


@CASES
@given(cases(), actors(), st.sampled_from([0.1, 1.0, 15.0]))
def test_policy_loss_and_gradient_equal_a_loop(case: Case, config: Actor, scale: float):
    log_probs, old_log_probs = case.numbers(scale).requires_grad_(), case.numbers(scale)
    advantages, weights = case.numbers(), case.numbers().abs()
    loss, metrics = policy_loss(log_probs, old_log_probs, advantages, case.mask, config, rollout_is_weights=weights)
    loss.backward()
    expected, gradient = loop_policy_loss(case, log_probs.detach(), old_log_probs, advantages, config, weights)
    # exp(20) amplifies float32's rounding of its argument by 20 x 2^-24
    tolerance = 1e-6 if scale < 1 else 1e-5
    assert float(loss.detach()) == pytest.approx(expected.pop("loss"), rel=tolerance, abs=1e-6)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(log_probs.grad, gradient, rtol=10 * tolerance, atol=1e-6)


def one(value: float) -> torch.Tensor:
    return torch.tensor([[value]])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipfrac", "lower"),
    [
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (1.5, 2.0, -2.4, 0.0, 1, 0),  # clipped at 1.2
        (0.5, 2.0, -1.0, -1.0, 0, 0),  # the lower bound does not hold back a positive advantage
        (0.5, -2.0, 1.6, 0.0, 1, 0),  # clipped at 0.8
        (1.5, -2.0, 3.0, 3.0, 0, 0),
        (5.0, -2.0, 6.0, 0.0, 0, 1),  # dual clip at c = 3
    ],
)
def test_policy_loss_hand_computed(ratio, advantage, loss, gradient, clipfrac, lower):
    log_probs = one(math.log(ratio)).requires_grad_()
    result, metrics = policy_loss(log_probs, one(0.0), one(advantage), one(1.0), Actor())
    result.backward()
    assert float(result.detach()) == pytest.approx(loss)
    assert float(log_probs.grad) == pytest.approx(gradient, abs=1e-6)
    assert (float(metrics["pg_clipfrac"]), float(metrics["pg_clipfrac_lower"])) == (clipfrac, lower)
    assert float(metrics["ppo_kl"]) == pytest.approx(-math.log(ratio))


def test_log_ratio_is_clamped_before_exp():
    loss, metrics = policy_loss(one(100.0), one(-100.0), one(-1.0), one(1.0), Actor(clip_ratio_c=None))
    assert float(loss) == pytest.approx(math.exp(20), rel=1e-5)
    assert float(metrics["ppo_kl"]) == -20.0


def test_rollout_weights_and_advantages_get_no_say_in_the_gradient():
    weights = one(2.0).requires_grad_()
    log_probs = one(0.0).requires_grad_()
    loss, _ = policy_loss(log_probs, one(0.0), one(1.0), one(1.0), Actor(), rollout_is_weights=weights)
    loss.backward()
    assert weights.grad is None
    assert float(log_probs.grad) == -2.0


@CASES
@given(cases(), st.none() | st.floats(0.05, 1.0))
def test_value_loss_and_gradient_equal_a_loop(case: Case, value_clip: float | None):
    values, old_values, returns = case.numbers().requires_grad_(), case.numbers(), case.numbers()
    loss, metrics = value_loss(values, old_values, returns, case.mask, Critic(value_clip=value_clip))
    loss.backward()
    total, clipped_tokens, gradient = 0.0, 0, torch.zeros(case.shape)
    n = len(case.tokens())
    for i, t in case.tokens():
        v, old, target = float(values[i, t].detach()), float(old_values[i, t]), float(returns[i, t])
        clipped = v if value_clip is None else min(max(v, old - value_clip), old + value_clip)
        worse = (clipped - target) ** 2 > (v - target) ** 2
        total += 0.5 * max((v - target) ** 2, (clipped - target) ** 2) / n
        clipped_tokens += worse
        gradient[i, t] = 0.0 if worse else (v - target) / n
    assert float(loss.detach()) == pytest.approx(total, rel=1e-5, abs=1e-6)
    assert float(metrics["vf_clipfrac"]) == pytest.approx(clipped_tokens / n)
    torch.testing.assert_close(values.grad, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("value_clip", "loss", "clipfrac"), [(0.5, 1.125, 1.0), (None, 0.5, 0.0), (2.0, 0.5, 0.0)])
def test_value_loss_hand_computed(value_clip, loss, clipfrac):
    # value 1, old value 0, return 2: unclipped error 1, clipped to 0.5 error 2.25
    result, metrics = value_loss(one(1.0), one(0.0), one(2.0), one(1.0), Critic(value_clip=value_clip))
    assert (float(result), float(metrics["vf_clipfrac"])) == (loss, clipfrac)


def test_entropy_loss_rewards_entropy():
    entropy = torch.tensor([[1.0, 3.0, 99.0]], requires_grad=True)
    loss, metrics = entropy_loss(entropy, torch.tensor([[1.0, 1.0, 0.0]]), Actor(entropy_coeff=0.1))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.2)
    assert metrics == {"entropy": torch.tensor(2.0)}
    torch.testing.assert_close(entropy.grad, torch.tensor([[-0.05, -0.05, 0.0]]))


@CASES
@given(cases(), st.lists(st.integers(0, 5), max_size=4))
def test_however_a_mini_batch_is_cut_the_parts_sum_to_the_whole(case: Case, cuts: list[int]):
    actor, critic = Actor(entropy_coeff=0.3), Critic()
    inputs = [case.numbers(0.5).requires_grad_()] + [case.numbers(0.5) for _ in range(2)] + [case.mask]

    def losses(rows: slice, num_tokens: int | None) -> list[torch.Tensor]:
        x, y, z, mask = (tensor[rows] for tensor in inputs)
        results = [
            policy_loss(x, y, z, mask, actor, num_tokens=num_tokens),
            value_loss(x, y, z, mask, critic, num_tokens=num_tokens),
            entropy_loss(x, mask, actor, num_tokens=num_tokens),
        ]
        return [loss for loss, _ in results] + [value for _, metrics in results for value in metrics.values()]

    whole = losses(slice(None), None)
    sum(whole[:3]).backward()
    gradient, inputs[0].grad = inputs[0].grad, None
    bounds = [0, *sorted(min(cut, len(case.mask)) for cut in cuts), len(case.mask)]
    num_tokens = int(case.mask.sum())
    parts = [losses(slice(*bound), num_tokens) for bound in zip(bounds, bounds[1:], strict=False)]
    for part in parts:
        sum(part[:3]).backward()
    torch.testing.assert_close([sum(column) for column in zip(*parts, strict=True)], whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inputs[0].grad, gradient, rtol=1e-6, atol=1e-7)


def test_what_stands_at_masked_tokens_does_not_reach_the_loss():
    mask = torch.tensor([[1.0, 0.0]])
    junk = torch.tensor([[0.5, math.nan]])
    loss, metrics = policy_loss(junk, junk, junk, mask, Actor())
    assert float(loss) == -0.5
    assert all(math.isfinite(float(value)) for value in metrics.values())


def test_a_batch_without_tokens_gives_zero_and_a_gradient_of_zero():
    values = torch.ones(2, 3, requires_grad=True)
    loss, metrics = value_loss(values, values.detach(), torch.zeros(2, 3), torch.zeros(2, 3), Critic())
    loss.backward()
    assert (float(loss.detach()), float(metrics["vf_clipfrac"])) == (0.0, 0.0)
    assert torch.equal(values.grad, torch.zeros(2, 3))
    empty = torch.zeros(0, 3, requires_grad=True)
    assert float(value_loss(empty, empty, empty, empty, Critic(), num_tokens=7)[0].detach()) == 0.0


def test_num_tokens_may_be_a_tensor():
    assert float(aggregate(torch.ones(1, 2), torch.ones(1, 2), "token-mean", num_tokens=torch.tensor(8))) == 0.25


def test_unknown_aggregation_lists_the_valid_ones_and_the_clip_loss_is_registered():
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'sum': choose one of token-mean"):
        aggregate(torch.ones(1, 1), torch.ones(1, 1), "sum")
    assert POLICY_LOSSES["clip"] is policy_loss
