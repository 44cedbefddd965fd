"""Choosing an estimator, rewards per token, whitening and explained variance: loops, hand-computed numbers, ranks."""

import inspect
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import CASES, Case, cases
from spawn import run_ranks

from megappo.config.methods import ESTIMATORS
from megappo.config.schema import Algorithm
from megappo.moments import explained_variance
from megappo.ppo.advantages import compute_token_level_rewards, estimate, gae, whiten
from megappo.ppo.conventions import PRESETS, Whitening
from megappo.ppo.estimators import grpo


def test_every_estimator_of_the_config_is_there():
    assert all(one.function.__name__ == name for name, one in ESTIMATORS.items())
    with pytest.raises(ValueError, match="adv_estimator"):
        Algorithm(adv_estimator="absent")


OF_THE_CONFIG = {"gamma", "lam", "norm_adv_by_std_in_grpo"}
"""Arguments that are keys of the config."""
OF_THE_TRAINER = {"gae_level"}
"""Keys of the config by which one function is called in place of another."""
OF_THE_METHOD = {"values": "needs_values", "groups": "compares_responses", "baselines": "needs_greedy_baseline"}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_declares_what_it_takes(name: str):
    declared = ESTIMATORS[name]
    taken = inspect.signature(declared.function).parameters.keys()
    assert set(declared.reads) - OF_THE_TRAINER == taken & OF_THE_CONFIG
    for argument, need in OF_THE_METHOD.items():
        assert getattr(declared, need) == (argument in taken)


def test_estimate_passes_what_the_estimator_takes():
    rewards, mask = torch.tensor([[1.0], [2.0]]), torch.ones(2, 1)
    inputs = {"token_level_rewards": rewards, "response_mask": mask, "values": rewards, "gamma": 0.9, "lam": 0.8}
    inputs |= {"groups": torch.zeros(2, dtype=torch.int64), "norm_adv_by_std_in_grpo": False, "bootstrap_values": None}
    assert torch.equal(estimate(gae, **inputs)[0], gae(rewards, rewards, mask, 0.9, 0.8)[0])
    assert torch.equal(
        estimate(ESTIMATORS["grpo"].function, **inputs)[0], grpo(rewards, mask, inputs["groups"], False)[0]
    )


def test_estimate_names_what_is_missing():
    with pytest.raises(TypeError, match="gae.* missing 2 required positional arguments: 'values' and 'lam'"):
        estimate(gae, token_level_rewards=torch.ones(1, 1), response_mask=torch.ones(1, 1), values=None, gamma=1.0)


@CASES
@given(cases(), st.integers(0, 1), st.sampled_from([1e-8, 1e-2]), st.booleans())
def test_whiten_equals_the_statistics_module(case: Case, ddof: int, eps: float, clamps: bool):
    whitening = Whitening(ddof=ddof, eps=eps, clamps_variance=clamps)
    x = case.numbers(case.uniform(0.05, 10.0)) + 100.0
    picked = [float(x[i, t]) for i, t in case.tokens()]
    variance = statistics.variance(picked) if ddof else statistics.pvariance(picked)
    mean, scale = statistics.mean(picked), 1 / math.sqrt(max(variance, eps) if clamps else variance + eps)
    for shift_mean in (True, False):
        expected = torch.zeros_like(x)
        for i, t in case.tokens():
            expected[i, t] = (float(x[i, t]) - mean) * scale + (0.0 if shift_mean else mean)
        found = whiten(x, case.mask, shift_mean, whitening=whitening)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        if whitening == Whitening():
            assert torch.equal(found, whiten(x, case.mask, shift_mean))


def test_whiten_of_equal_numbers_is_0():
    for clamps in (False, True):
        whitening = Whitening(clamps_variance=clamps)
        assert whiten(torch.full((2, 3), 0.1), torch.ones(2, 3), whitening=whitening).abs().max() < 1e-6


def test_whiten_refuses_what_is_not_finite():
    for broken in (math.nan, math.inf):
        with pytest.raises(FloatingPointError, match="3 tokens with mask 1 are not all finite"):
            whiten(torch.tensor([[1.0, broken, 2.0]]), torch.ones(1, 3))


def test_whiten_hand_computed_and_blind_to_padding():
    whitened = whiten(torch.tensor([[1.0, 3.0, math.nan]]), torch.tensor([[1.0, 1.0, 0.0]]))
    torch.testing.assert_close(whitened, torch.tensor([[-(0.5**0.5), 0.5**0.5, 0.0]]))


def test_whiten_keeps_small_differences_of_large_numbers():
    """E[x^2] - E[x]^2 in float32 would lose the variance altogether."""
    x = torch.tensor([[16777216.0, 16777218.0, 16777220.0]])
    torch.testing.assert_close(whiten(x, torch.ones(1, 3)), torch.tensor([[-1.0, 0.0, 1.0]]))


@pytest.mark.parametrize("ones", [0, 1])
@pytest.mark.parametrize("preset", PRESETS)
def test_whiten_of_fewer_than_two_tokens_is_defined(ones: int, preset: str):
    """A single number is its own mean; there is no variance to scale it by."""
    x, mask = torch.full((1, 4), 7.0), (torch.arange(4) < ones).float()[None]
    for whitening in (PRESETS[preset].whitening, PRESETS[preset].reinforce_whitening):
        assert torch.equal(whiten(x, mask, whitening=whitening), torch.zeros(1, 4))
        assert torch.equal(whiten(x, mask, shift_mean=False, whitening=whitening), x * mask)


def whitened_parts(rank: int, world_size: int) -> None:
    case = Case(5, 9, 7)
    x = case.numbers() + 3.0
    mine = slice(0, 0) if rank == 0 else slice(0, 2) if rank == 1 else slice(2, 5)  # rank 0 has no rows
    group = torch.distributed.group.WORLD
    part = whiten(x[mine], case.mask[mine], group=group)
    torch.testing.assert_close(part, whiten(x, case.mask)[mine], rtol=1e-6, atol=1e-7)
    local = whiten(x, case.mask * (rank + 1 > torch.arange(5)[:, None]))  # group None: other ranks' tokens do not count
    assert rank == 2 or not torch.allclose(local[0], whiten(x, case.mask)[0])


def test_whitening_over_ranks_equals_one_process():
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
    with pytest.raises(FloatingPointError, match=r"scores of responses \[0\] are not finite"):
        compute_token_level_rewards(torch.tensor([math.nan, 1.0]), torch.ones(2, 2))


def test_explained_variance_hand_computed():
    assert explained_variance(0.0, 4.0) == pytest.approx(1.0)
    assert explained_variance(4.0, 4.0) == pytest.approx(0.0, abs=1e-5)
    assert explained_variance(1.0, 4.0) == pytest.approx(0.75, abs=1e-5)
