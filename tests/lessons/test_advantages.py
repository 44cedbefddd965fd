"""Tokens of an environment are no actions of the policy, and advantages are whitened over all ranks: bugs of others."""

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks

from megappo.ppo.advantages import compute_token_level_rewards, gae, whiten
from megappo.ppo.estimators import reinforce_plus_plus


def one_row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers])


def every_token_a_step(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> list[float]:
    """The wrong GAE of one row, which knows no mask: each token has a value and discounts."""
    advantages, running, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards[0].tolist()), reversed(values[0].tolist()), strict=True):
        running = reward + gamma * next_value - value + gamma * lam * running
        next_value = value
        advantages.insert(0, running)
    return advantages


def steps_of_the_policy(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> list[float]:
    """GAE of one row as if nothing stood between the policy's tokens; 0 at the others."""
    kept = mask.bool()
    found = iter(every_token_a_step(rewards[kept][None], values[kept][None], gamma, lam))
    return [next(found) if one else 0.0 for one in mask[0].tolist()]


def test_a_reward_reaches_what_was_written_before_the_environment() -> None:
    """REINFORCE++ ended its sum of rewards at a tool's answer as at padding: what the policy wrote before it got none.

    https://github.com/verl-project/verl/pull/7300 for https://github.com/verl-project/verl/issues/7278
    """
    rewards, mask = one_row(0, 0, 0, 0, 0, 1), one_row(1, 1, 0, 0, 1, 1)
    wrong, running = [], 0.0
    for reward, one in zip(reversed(rewards[0].tolist()), reversed(mask[0].tolist()), strict=True):
        running = reward + running
        wrong.insert(0, running * one)
        running *= one
    assert wrong == [0, 0, 0, 0, 1, 1]
    assert reinforce_plus_plus(rewards, mask, gamma=1.0)[0].tolist() == [[1, 1, 0, 0, 1, 1]]
    assert reinforce_plus_plus(rewards, mask, gamma=0.5)[0].tolist() == [[0.125, 0.25, 0, 0, 0.5, 1]]


@pytest.mark.parametrize(("gamma", "lam"), [(0.0, 0.0), (0.9, 0.8), (1.0, 0.95)])
def test_what_the_environment_wrote_is_no_step_and_takes_no_score(gamma: float, lam: float) -> None:
    """The score lay on the last token even where the environment wrote it, whose KL and values counted, and each of
    whose tokens discounted: with gamma 0 the score was lost.

    https://github.com/radixark/miles/pull/1827
    """
    mask, values = one_row(1, 1, 0, 0, 1, 0), one_row(0.25, -0.5, 3.0, -2.0, 0.75, 1.5)
    kl, score, coef = one_row(0.1, 0.2, 5.0, 5.0, 0.3, 5.0), torch.tensor([8.0]), 0.5
    rewards = compute_token_level_rewards(score, mask, kl, coef)
    assert rewards[0].tolist() == pytest.approx([-0.05, -0.1, 0.0, 0.0, 8.0 - 0.15, 0.0])
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    right = steps_of_the_policy(rewards, values, mask, gamma, lam)
    assert advantages[0].tolist() == pytest.approx(right, abs=1e-6)
    torch.testing.assert_close(returns, one_row(*right) + values * mask)
    on_last = -coef * kl
    on_last[0, -1] += score[0]
    wrong = every_token_a_step(on_last, values, gamma, lam)
    assert abs(wrong[4] - right[4]) > 0.5 and (gamma > 0 or abs(wrong[4] - right[4]) == pytest.approx(8.0))


@pytest.mark.parametrize("behind", [100.0, float("nan")])
def test_values_behind_the_mask_bootstrap_nothing(behind: float) -> None:
    """The critic's value at a masked token, 100, was the next value of the policy's last one: advantages of 5.7 and 6.

    https://github.com/alibaba/ROLL/pull/447
    """
    rewards, values, mask = one_row(0, 1, 0), one_row(0, 0, behind), one_row(1, 1, 0)
    assert every_token_a_step(rewards, one_row(0, 0, 100), 1.0, 0.95) == pytest.approx([5.7, 6.0, -100.0])
    for found in gae(rewards, values, mask, gamma=1.0, lam=0.95):
        assert found[0].tolist() == pytest.approx([0.95, 1.0, 0.0])


ADVANTAGES = torch.tensor([[4.0, 5.0, 6.0], [-2.0, 0.0, 100.0]])
WRITTEN = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def check_whitened(rank: int, world_size: int) -> None:
    of_tokens = [4.0, 5.0, 6.0, -2.0, 0.0]
    mean = sum(of_tokens) / 5
    deviation = (sum((x - mean) ** 2 for x in of_tokens) / 4) ** 0.5
    right = (ADVANTAGES[rank] - mean) / deviation * WRITTEN[rank]
    mine = ADVANTAGES[rank : rank + 1], WRITTEN[rank : rank + 1]
    assert whiten(*mine, group=dist.group.WORLD)[0].tolist() == pytest.approx(right.tolist(), abs=1e-6)
    alone, padded = whiten(*mine)[0], whiten(mine[0], torch.ones(1, 3), group=dist.group.WORLD)[0]
    assert abs(alone[0] - right[0]) > 0.5 and abs(padded[0] - right[0]) > 0.5


def test_advantages_are_whitened_over_the_tokens_of_all_ranks() -> None:
    """Each context-parallel rank took mean and variance of its own part, so that parts of one response were shifted
    differently. Padding must not count either.

    https://github.com/THUDM/slime/pull/2235
    """
    run_ranks(2, check_whitened)
