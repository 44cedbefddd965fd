"""Estimators without a critic against plain loops in Python floats, and hand-computed numbers."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import CASES, Case
from spawn import run_ranks

from megappo.config.methods import ESTIMATORS
from megappo.ppo.advantages import estimate
from megappo.ppo.estimators import gdpo, gpg, grpo, opo, optimal_token_baseline, reinforce_plus_plus, remax, rloo

GROUPED = ["grpo", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "grpo_passk", "gdpo"]


class Prompts(Case):
    """Responses to several prompts in any order, each with a token; rewards whose sums are exact in float32."""

    def __init__(self, sizes: list[int], width: int, seed: int):
        super().__init__(sum(sizes), width, seed)
        self.mask[
            torch.arange(len(self.mask)), torch.randint(0, width, (len(self.mask),), generator=self.generator)
        ] = 1.0
        order = torch.randperm(sum(sizes), generator=self.generator)
        self.groups = torch.arange(7, 7 + len(sizes)).repeat_interleave(torch.tensor(sizes))[order]
        self.rewards = (self.numbers() * 64).round() / 64
        self.rewards[self.mask == 0] = math.nan
        self.scores = [sum(float(self.rewards[i, t]) for t in self.row(i)) for i in range(sum(sizes))]

    def row(self, i: int) -> list[int]:
        return [t for t in range(self.shape[1]) if self.mask[i, t] == 1]

    def same_prompt(self, i: int) -> list[int]:
        return [j for j in range(len(self.groups)) if self.groups[j] == self.groups[i]]

    def on_tokens(self, per_response: list[float]) -> torch.Tensor:
        return torch.where(self.mask == 1, torch.tensor(per_response)[:, None], 0.0)


def estimated(name: str, rewards: torch.Tensor, mask: torch.Tensor, groups: torch.Tensor, **inputs: object):
    """(advantages, returns); for gdpo with a single score, the sum of the rewards."""
    score = torch.where(mask.bool(), rewards.double(), 0.0).sum(dim=1, keepdim=True).float()
    inputs |= {"response_mask": mask, "groups": groups, "score_components": score}
    return estimate(ESTIMATORS[name].function, token_level_rewards=rewards, **inputs)


PROMPTS = st.builds(
    Prompts, st.lists(st.integers(2, 4), min_size=1, max_size=3), st.integers(2, 12), st.integers(0, 2**31)
)


def oracle_grpo(case: Prompts, i: int) -> float:
    scores = [case.scores[j] for j in case.same_prompt(i)]
    return (case.scores[i] - statistics.mean(scores)) / (statistics.stdev(scores) + 1e-6)


def oracle_mean_baseline(case: Prompts, i: int) -> float:
    return case.scores[i] - statistics.mean(case.scores[j] for j in case.same_prompt(i))


def oracle_rloo(case: Prompts, i: int) -> float:
    return case.scores[i] - statistics.mean(case.scores[j] for j in case.same_prompt(i) if j != i)


def oracle_opo(case: Prompts, i: int) -> float:
    same = case.same_prompt(i)
    weighted = sum(len(case.row(j)) * case.scores[j] for j in same)
    return case.scores[i] - weighted / sum(len(case.row(j)) for j in same)


def oracle_gpg(case: Prompts, i: int) -> float:
    num_nonzero = sum(score != 0 for score in case.scores)
    return len(case.scores) / max(num_nonzero, 1) * oracle_mean_baseline(case, i)


def oracle_grpo_passk(case: Prompts, i: int) -> float:
    others = [case.scores[j] for j in case.same_prompt(i) if j != i]
    if case.scores[i] <= max(others):
        return 0.0
    return (case.scores[i] - max(others)) / (statistics.stdev([case.scores[i], *others]) + 1e-6)


ORACLES = {
    "grpo": oracle_grpo,
    "rloo": oracle_rloo,
    "reinforce_plus_plus_baseline": oracle_mean_baseline,
    "opo": oracle_opo,
    "gpg": oracle_gpg,
    "grpo_passk": oracle_grpo_passk,
    "gdpo": oracle_grpo,
}


@pytest.mark.parametrize("name", GROUPED)
@CASES
@given(case=PROMPTS)
def test_grouped_estimators_equal_loops(name: str, case: Prompts):
    if name == "gpg":
        case.rewards[0], case.scores[0] = 0.0, 0.0
    found = estimated(name, case.rewards, case.mask, case.groups)
    expected = case.on_tokens([ORACLES[name](case, i) for i in range(len(case.groups))])
    torch.testing.assert_close(found, (expected, expected), rtol=1e-6, atol=1e-6)


@CASES
@given(PROMPTS)
def test_dr_grpo_equals_a_loop(case: Prompts):
    found, _ = grpo(case.rewards, case.mask, case.groups, norm_adv_by_std_in_grpo=False)
    expected = case.on_tokens([oracle_mean_baseline(case, i) for i in range(len(case.groups))])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def rewards_to_go(case: Prompts, gamma: float) -> torch.Tensor:
    returns = torch.zeros(case.shape)
    for i in range(len(case.mask)):
        total = 0.0
        for t in reversed(case.row(i)):
            total = float(case.rewards[i, t]) + gamma * total
            returns[i, t] = total
    return returns


@CASES
@given(PROMPTS)
def test_reinforce_plus_plus_equals_a_loop(case: Prompts):
    gamma = case.uniform(0.5, 1.0)
    expected = rewards_to_go(case, gamma)
    found = reinforce_plus_plus(case.rewards, case.mask, gamma)
    torch.testing.assert_close(found, (expected, expected), rtol=1e-6, atol=1e-6)


@CASES
@given(PROMPTS)
def test_remax_equals_a_loop(case: Prompts):
    baselines = case.numbers()[:, 0]
    returns = rewards_to_go(case, 1.0)
    expected = torch.zeros(case.shape)
    for i, t in case.tokens():
        expected[i, t] = float(returns[i, t]) - float(baselines[i])
    torch.testing.assert_close(remax(case.rewards, case.mask, baselines), (expected, returns), rtol=1e-6, atol=1e-6)


ONES = torch.ones(3, 2)
SCORES_1_2_6 = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 6.0]])
ONE_PROMPT = torch.zeros(3, dtype=torch.int64)
ONLY_THE_SECOND = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])


def test_group_baselines_hand_computed():
    """Scores 1, 2, 6: mean 3, standard deviation sqrt((4 + 1 + 9) / 2) = sqrt(7)."""
    std = math.sqrt(7) + 1e-6
    expected = torch.tensor([-2 / std, -1 / std, 3 / std])
    torch.testing.assert_close(grpo(SCORES_1_2_6, ONES, ONE_PROMPT)[0], expected[:, None].expand(3, 2))
    assert rloo(SCORES_1_2_6, ONES, ONE_PROMPT)[0][:, 0].tolist() == [1 - 4.0, 2 - 3.5, 6 - 1.5]
    lengths_2_1_1 = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 1.0]])  # weighted mean (2 + 2 + 6) / 4 = 2.5
    advantages, _ = opo(SCORES_1_2_6, lengths_2_1_1, ONE_PROMPT)
    assert advantages.tolist() == [[-1.5, -1.5], [0.0, -0.5], [0.0, 3.5]]


def test_gpg_scales_by_the_share_of_scores_that_are_not_0():
    rewards = torch.tensor([[0.0], [1.0], [0.0], [0.0]])
    advantages, _ = gpg(rewards, torch.ones(4, 1), torch.tensor([0, 0, 1, 1]))
    assert advantages.flatten().tolist() == [4 * -0.5, 4 * 0.5, 0.0, 0.0]
    zeros = torch.zeros(4, 1)
    assert gpg(zeros, torch.ones(4, 1), torch.tensor([0, 0, 1, 1]))[0].count_nonzero() == 0


@pytest.mark.parametrize("name", GROUPED)
def test_equal_scores_have_advantage_0_exactly(name: str):
    rewards = torch.tensor([[0.1, 0.0], [0.03, 0.07], [0.1, 0.0]]) / 3
    rewards[1] = rewards[0].flip(0)
    advantages, _ = estimated(name, rewards, ONES, ONE_PROMPT)
    assert advantages.count_nonzero() == 0


def test_reinforce_plus_plus_carries_the_reward_through_an_environments_turn():
    mask = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    rewards = torch.tensor([[1.0, 5.0, math.nan, 4.0]])
    _, returns = reinforce_plus_plus(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[1.0 + 0.5 * 4.0, 0.0, 0.0, 4.0]]


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_is_refused(name: str):
    with pytest.raises(ValueError, match=r"groups \[9\] have one response only.*rollout.n >= 2"):
        estimated(name, SCORES_1_2_6, ONES, torch.tensor([4, 9, 4]))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gae"])
def test_rows_without_tokens_and_broken_rewards_are_refused(name: str):
    inputs = {"gamma": 1.0, "baselines": torch.zeros(3), "old_log_probs": torch.zeros(3, 2)}
    with pytest.raises(ValueError, match=r"responses \[0, 2\] have no token"):
        estimated(name, SCORES_1_2_6, ONLY_THE_SECOND, ONE_PROMPT, **inputs)
    for broken in (math.nan, math.inf):
        rewards = SCORES_1_2_6.clone()
        rewards[1, 0] = broken
        with pytest.raises(FloatingPointError, match=r"rewards of responses \[1\] are not finite"):
            estimated(name, rewards, ONES, ONE_PROMPT, **inputs)


def test_remax_refuses_a_broken_baseline():
    with pytest.raises(FloatingPointError, match=r"baselines of responses \[2\] are not finite"):
        remax(SCORES_1_2_6, ONES, torch.tensor([0.0, 1.0, math.nan]))


def gpg_parts(rank: int, world_size: int) -> None:
    case = Prompts([2, 3, 2], 5, 11)
    order = case.groups.argsort()
    rewards, mask, groups = case.rewards[order], case.mask[order], case.groups[order]
    rewards[:2] = 0.0
    mine = slice(0, 0) if rank == 0 else slice(0, 2) if rank == 1 else slice(2, 7)  # rank 0 has no rows
    whole, _ = gpg(rewards, mask, groups)
    part, _ = gpg(rewards[mine], mask[mine], groups[mine], torch.distributed.group.WORLD)
    assert torch.equal(part, whole[mine])
    alone, _ = gpg(rewards[mine], mask[mine], groups[mine])
    assert rank != 2 or not torch.allclose(alone, whole[mine])


def test_gpg_counts_the_responses_of_all_ranks():
    run_ranks(3, gpg_parts)


@CASES
@given(PROMPTS, st.integers(1, 3), st.booleans())
def test_gdpo_adds_up_the_grpo_advantages_of_each_reward(case: Prompts, num_rewards: int, by_std: bool):
    components = torch.randn(len(case.mask), num_rewards, generator=case.generator)
    expected = [0.0] * len(case.mask)
    for scores in components.unbind(1):
        for i in range(len(case.mask)):
            group = [float(scores[j]) for j in case.same_prompt(i)]
            scale = statistics.stdev(group) + 1e-6 if by_std else 1.0
            expected[i] += (float(scores[i]) - statistics.mean(group)) / scale
    found, _ = gdpo(components, case.mask, case.groups, by_std)
    torch.testing.assert_close(found, case.on_tokens(expected), rtol=1e-4, atol=1e-4)


def test_gdpo_keeps_apart_what_the_sum_of_rewards_confounds():
    """(1, 0) and (0, 1) have one sum; on the first reward three of four agree, on the second two."""
    components = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    rewards, ones, groups = components.sum(1, keepdim=True), torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)
    assert len(set(grpo(rewards, ones, groups)[0][:3].flatten().tolist())) == 1
    advantages = gdpo(components, ones, groups)[0].flatten()
    first, second = math.sqrt(0.25), math.sqrt(1 / 3)  # standard deviations
    assert advantages.tolist() == pytest.approx(
        [0.75 / first - 0.5 / second, *[-0.25 / first + 0.5 / second] * 2, -0.25 / first - 0.5 / second], rel=1e-4
    )


@CASES
@given(PROMPTS, st.booleans(), st.booleans())
def test_optimal_token_baseline_equals_a_loop(case: Prompts, has_squares: bool, weighted: bool):
    log_probs = -case.numbers().abs()
    squares = case.numbers().abs().clamp(max=1.0) if has_squares else None
    weights = case.numbers().abs() if weighted else None
    found, returns = optimal_token_baseline(case.rewards, case.mask, case.groups, log_probs, squares, weights)
    to_go = rewards_to_go(case, 1.0)
    energies = torch.zeros(case.shape, dtype=torch.float64)
    for i in range(len(case.mask)):
        energy = 0.0
        for t in case.row(i):
            p = math.exp(float(log_probs[i, t]))
            square = p if squares is None else float(squares[i, t])
            energy += (1 - 2 * p + square) * (1.0 if weights is None else float(weights[i, t]) ** 2)
            energies[i, t] = energy
    expected = torch.zeros(case.shape)
    for i in range(len(case.mask)):
        for t in case.row(i):
            there = [j for j in case.same_prompt(i) if case.mask[j, t]]
            total = sum(float(energies[j, t]) for j in there)
            weighted_sum = sum(float(energies[j, t]) * float(to_go[j, t]) for j in there)
            baseline = weighted_sum / (total + 1e-8) if len(there) > 1 else 0.0
            expected[i, t] = float(to_go[i, t]) - baseline
    torch.testing.assert_close(returns, to_go, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
