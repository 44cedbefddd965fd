"""The KL to the reference counts once, and where it is a reward the critic learns it: bugs of others."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ppo_engines import at_owners
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.config.checks import config_warnings
from megappo.config.schema import Config
from megappo.placement.components import components_of
from megappo.ppo.kl import KLController
from megappo.ppo.reward_shaping import RunningMoments
from megappo.trainer.experience import add_advantages
from megappo.trainer.objectives import ActorLoss, critic_loss
from megappo.trainer.progress import Experience

GAMMA, LAM, REWARD_COEF, LOSS_COEF = 0.9, 0.8, 0.5, 0.25
SCORES, LENGTHS = (1.0, -1.0), (3, 2)
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
VALUES = torch.tensor([[0.5, 0.25, -0.5], [1.0, 0.0, 0.0]])
OLD = -MASK
REF = OLD - torch.tensor([[0.5, 1.0, 2.0], [1.5, 0.25, 0.0]])
KL = OLD - REF  # k1


def make_config(in_reward: bool, in_loss: bool) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["f"]},
            "trainer": {"output_dir": "o"},
            "actor": {"use_kl_loss": in_loss, "kl_loss_type": "k1", "kl_loss_coef": LOSS_COEF},
            "critic": {"value_clip": None},
            "algorithm": {
                **{"gamma": GAMMA, "lam": LAM, "whiten_advantages": False, "use_kl_in_reward": in_reward},
                **{"kl_penalty": "k1", "kl_ctrl": {"kl_coef": REWARD_COEF}},
            },
        }
    )


def make_rows() -> Rows:
    ids, lengths = torch.arange(2), torch.tensor(LENGTHS)
    tokens = torch.zeros(int((1 + lengths).sum()), dtype=torch.int64)
    fields = {"response_mask": MASK, "values": VALUES, "old_log_probs": OLD, "ref_log_probs": REF}
    fields |= {"rollout_log_probs": OLD, "scores": torch.tensor(SCORES), "truncated": torch.zeros(2)}
    return Rows(ids, ids, torch.ones_like(ids), lengths, tokens, fields)


def advantages_of(config: Config) -> Experience:
    exchange = Exchange(dist.group.WORLD)
    progress = SimpleNamespace(kl=KLController(config.algorithm.kl_ctrl), reward_moments=RunningMoments())
    return add_advantages(config, exchange, progress, 1, at_owners(exchange, make_rows()), {})


def plain_advantages(coef: float) -> list[list[float]]:
    """GAE of rewards with so much of the KL in them, token by token."""
    rows = []
    for row, length in enumerate(LENGTHS):
        advantages, running, next_value = [0.0] * 3, 0.0, 0.0
        for t in reversed(range(length)):
            reward = -coef * float(KL[row, t]) + (SCORES[row] if t == length - 1 else 0.0)
            running = reward + GAMMA * next_value - float(VALUES[row, t]) + GAMMA * LAM * running
            next_value = float(VALUES[row, t])
            advantages[t] = running
        rows.append(advantages)
    return rows


def actor_loss(config: Config, rows: Rows) -> float:
    """At the old policy, where every ratio is 1."""
    outputs = {"log_probs": OLD.clone().requires_grad_(), "entropy": torch.zeros_like(OLD)}
    return float(ActorLoss(config, 5, 2)(outputs, rows)[0].detach())


def check_counted_once(rank: int, world_size: int) -> None:
    for in_reward, in_loss in ((True, False), (False, True)):
        config = make_config(in_reward, in_loss)
        rows = advantages_of(config).batch.rows
        right, wrong = (plain_advantages(REWARD_COEF * one) for one in (in_reward, not in_reward))
        assert rows.fields["advantages"].tolist() == [pytest.approx(row, abs=1e-6) for row in right]
        mean_kl = float(KL.sum()) / 5
        policy = -sum(map(sum, right)) / 5
        loss = actor_loss(config, rows)
        assert loss == pytest.approx(policy + LOSS_COEF * in_loss * mean_kl, abs=1e-6)
        twice = -sum(map(sum, plain_advantages(REWARD_COEF))) / 5 + LOSS_COEF * mean_kl
        assert abs(loss - twice) > 0.1 and max(abs(a - b) for a, b in zip(right[0], wrong[0], strict=True)) > 0.5


def test_the_kl_is_in_the_rewards_or_in_the_loss_by_its_own_key() -> None:
    """GAE subtracted the KL from every reward, whatever the settings, while the loss had its KL term, too.

    https://github.com/NVIDIA-NeMo/RL/pull/2530 (found in review, of advantage_estimator.py)
    """
    run_ranks(1, check_counted_once)


def test_a_kl_that_counts_twice_gives_a_warning() -> None:
    """One of the two keys is on by default: setting only the other would be the bug above, without a warning."""
    warnings = [list(config_warnings(make_config(True, in_loss))) for in_loss in (False, True)]
    assert warnings[0] == list(config_warnings(make_config(False, True))) == []
    [warning] = warnings[1]
    assert warning.startswith("actor.use_kl_loss true is unusual: the KL to the reference is in the rewards already")


def check_returns(rank: int, world_size: int) -> None:
    config = make_config(in_reward=True, in_loss=False)
    rows = advantages_of(config).batch.rows
    right, wrong = (torch.tensor(plain_advantages(coef)) + VALUES * MASK for coef in (REWARD_COEF, 0.0))
    torch.testing.assert_close(rows.fields["returns"], right, rtol=0, atol=1e-6)
    assert "returns" in components_of(config)["critic"].training.fields
    losses = [float(critic_loss(config, 5, 2)({"values": values}, rows)[0]) for values in (right, wrong)]
    assert losses[0] == pytest.approx(0.0, abs=1e-9) and losses[1] > 0.1


def test_the_critics_targets_have_the_kl_that_the_actors_rewards_have() -> None:
    """The critic was trained before the reference's log-probs were there: its targets had no KL, the rewards had.

    https://github.com/radixark/miles/pull/2367 (there refused since)
    """
    run_ranks(1, check_returns)
