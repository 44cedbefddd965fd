"""Advantages against token loops in Python floats, hand-computed numbers, and whitening over real ranks."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from ragged import CASES, Case, cases
from spawn import run_ranks

from megappo.ppo.advantages import ESTIMATORS, compute_token_level_rewards, explained_variance, gae, whiten


def loop_gae(rewards, values, mask, gamma, lam):
    """GAE by its definition on each row's compressed policy tokens."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for i in range(len(values)):
        positions = [t for t in range(values.shape[1]) if mask[i, t] == 1]
        for start, t in enumerate(positions):
            total = 0.0
            for k, s in enumerate(positions[start:]):
                following = positions[start + k + 1 : start + k + 2]
                next_value = float(values[i, following[0]]) if following else 0.0
                total += (gamma * lam) ** k * (float(rewards[i, s]) + gamma * next_value - float(values[i, s]))
            advantages[i, t] = total
            returns[i, t] = total + float(values[i, t])
    return advantages, returns


@CASES
@given(cases())
def test_gae_equals_its_definition_on_ragged_masks(case: Case):
    rewards, values = case.numbers(), case.numbers()
    gamma, lam = case.uniform(0.8, 1.0), case.uniform(0.0, 1.0)
    expected = loop_gae(rewards, values, case.mask, gamma, lam)
    torch.testing.assert_close(gae(rewards, values, case.mask, gamma, lam), expected, rtol=1e-5, atol=1e-5)


def test_gae_textbook_numbers():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.25, 0.5]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.5, lam=0.5)
    # deltas: 0 + 0.5*0.25 - 0.5 = -0.375; 0 + 0.5*0.5 - 0.25 = 0; 1 - 0.5 = 0.5; gamma*lam = 0.25
    assert advantages.tolist() == [[-0.375 + 0.25 * 0.125, 0.125, 0.5]]
    assert returns.tolist() == [[0.15625, 0.375, 1.0]]


def test_gae_with_gamma_and_lambda_1_returns_the_sum_of_rewards():
    rewards = torch.tensor([[1.0, 2.0, 3.0]])
    _, returns = gae(rewards, torch.tensor([[9.0, -4.0, 2.0]]), torch.ones(1, 3), gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[6.0, 5.0, 3.0]]))


def test_gae_ignores_whatever_stands_at_masked_tokens():
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    rewards = torch.tensor([[0.0, math.nan, 1.0, math.inf]])
    values = torch.tensor([[0.5, math.inf, 0.25, math.nan]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    dense = gae(rewards[:, [0, 2]], values[:, [0, 2]], torch.ones(1, 2), gamma=0.9, lam=0.8)
    assert torch.equal(advantages[:, [0, 2]], dense[0])
    assert torch.equal(returns[:, [0, 2]], dense[1])
    assert advantages[0, [1, 3]].tolist() == returns[0, [1, 3]].tolist() == [0.0, 0.0]


def test_gae_of_no_rows_is_empty_and_it_is_registered():
    empty = torch.zeros(0, 4)
    assert [x.shape for x in gae(empty, empty, empty, 1.0, 1.0)] == [(0, 4), (0, 4)]
    assert ESTIMATORS["gae"] is gae


@CASES
@given(cases())
def test_whiten_equals_the_statistics_module(case: Case):
    x = case.numbers(case.uniform(0.1, 10.0)) + 100.0
    picked = [float(x[i, t]) for i, t in case.tokens()]
    mean, scale = statistics.mean(picked), 1 / math.sqrt(statistics.variance(picked) + 1e-8)
    for shift_mean in (True, False):
        expected = torch.zeros_like(x)
        for i, t in case.tokens():
            expected[i, t] = (float(x[i, t]) - mean) * scale + (0.0 if shift_mean else mean)
        torch.testing.assert_close(whiten(x, case.mask, shift_mean), expected, rtol=1e-6, atol=1e-6)


def test_whiten_hand_computed_and_blind_to_padding():
    whitened = whiten(torch.tensor([[1.0, 3.0, math.nan]]), torch.tensor([[1.0, 1.0, 0.0]]))
    torch.testing.assert_close(whitened, torch.tensor([[-(0.5**0.5), 0.5**0.5, 0.0]]))


def test_whiten_keeps_small_differences_of_large_numbers():
    """E[x^2] - E[x]^2 in float32 would lose the variance altogether."""
    x = torch.tensor([[16777216.0, 16777218.0, 16777220.0]])
    torch.testing.assert_close(whiten(x, torch.ones(1, 3)), torch.tensor([[-1.0, 0.0, 1.0]]))


@pytest.mark.parametrize("ones", [0, 1])
def test_whiten_refuses_fewer_than_two_tokens(ones: int):
    mask = (torch.arange(4) < ones).float()[None]
    with pytest.raises(ValueError, match=f"at least 2 tokens with mask 1, got {ones}"):
        whiten(torch.zeros(1, 4), mask)


def whitened_parts(rank: int, world_size: int) -> None:
    case = Case(5, 9, 7)
    x, returns = case.numbers() + 3.0, case.numbers()
    mine = slice(0, 0) if rank == 0 else slice(0, 2) if rank == 1 else slice(2, 5)  # rank 0 has no rows
    group = torch.distributed.group.WORLD
    part = whiten(x[mine], case.mask[mine], group=group)
    torch.testing.assert_close(part, whiten(x, case.mask)[mine], rtol=1e-6, atol=1e-7)
    explained = explained_variance(x[mine], returns[mine], case.mask[mine], group=group)
    assert explained == pytest.approx(explained_variance(x, returns, case.mask), rel=1e-9)
    local = whiten(x, case.mask * (rank + 1 > torch.arange(5)[:, None]))  # group None: other ranks' tokens do not count
    assert rank == 2 or not torch.allclose(local[0], whiten(x, case.mask)[0])


def test_whitening_and_explained_variance_over_ranks_equal_one_process():
    run_ranks(3, whitened_parts)


@CASES
@given(cases())
def test_token_level_rewards_equal_a_loop(case: Case):
    case.mask[:, 1] = 1.0  # every response has a token
    scores, kl, coef = case.numbers()[:, 0], case.numbers(), case.uniform(0.0, 1.0)
    expected = torch.zeros(case.shape)
    for i, t in case.tokens():
        expected[i, t] = -coef * float(kl[i, t])
    for i, score in enumerate(scores.tolist()):
        expected[i, max(t for row, t in case.tokens() if row == i)] += score
    torch.testing.assert_close(compute_token_level_rewards(scores, case.mask, kl, coef), expected, rtol=1e-6, atol=1e-6)


def test_token_level_rewards_without_kl_put_the_score_on_the_last_policy_token():
    mask = torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]])
    rewards = compute_token_level_rewards(torch.tensor([2.0, -1.0]), mask)
    assert rewards.tolist() == [[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, -1.0, 0.0]]


def test_token_level_rewards_lose_no_score():
    with pytest.raises(ValueError, match=r"responses \[1\] have no token"):
        compute_token_level_rewards(torch.ones(2), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match=r"scores of responses \[0\] are not finite"):
        compute_token_level_rewards(torch.tensor([math.nan, 1.0]), torch.ones(2, 2))


def test_explained_variance_hand_computed():
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    returns = torch.tensor([[0.0, 2.0, 4.0, 99.0]])  # variance 4
    assert explained_variance(returns + 5.0, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(1, 4), returns, mask) == pytest.approx(0.0, abs=1e-5)
    half = torch.tensor([[0.0, 1.0, 2.0, -99.0]])  # residual variance 1
    assert explained_variance(half, returns, mask) == pytest.approx(0.75, abs=1e-5)
