"""Signals of teachers, against loops in float64: two teachers and rows without one, in rows on two ranks."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ppo_engines import at_owners
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.ppo.kl import KLController
from megappo.ppo.reward_shaping import RunningMoments
from megappo.trainer.experience import add_advantages
from megappo.trainer.objectives import ActorLoss

MASKS = ("111", "101", "11", "1", "011", "111", "10", "11")
TEACHERS = (1, 2, 0, 1, 2, 2, 1, 0)
KL_COEF, COEF = 0.3, 0.7
CASES = [
    *itertools.product(("reward", "advantage"), ("k1", "k3"), ("gae", "reinforce_plus_plus"), (True, False)),
    ("reward", "full", "gae", True),
    ("advantage", "full", "rloo", False),
]
"""Signal, KL estimator, advantage estimator, task_reward."""


def make_config(signal: str, kind: str | None, estimator: str = "gae", *, task_reward: bool = True) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["f"], "train_batch_size": 4},
            "trainer": {"output_dir": "o"},
            "rollout": {"n": 2, "max_response_length": 3},
            "algorithm": {
                **{"gamma": 0.9, "lam": 0.8, "adv_estimator": estimator, "kl_ctrl": {"kl_coef": KL_COEF}},
                **{"whiten_advantages": False},
            },
            "teachers": {"a": {"when": {"source": "a"}}, "b": {"when": {"source": ["b", 2]}}},
            "distillation": {"signal": signal, "coef": COEF, "kl_type": kind, "task_reward": task_reward},
        }
    )


def make_rows() -> Rows:
    generator = torch.Generator().manual_seed(3)
    names = ("old_log_probs", "ref_log_probs", "teacher_log_probs", "rollout_log_probs", "values", "full_kl")
    fields = {name: torch.randn(len(MASKS), 3, generator=generator) / 2 for name in names}  # k3 is clamped at 10
    fields["scores"] = torch.randn(len(MASKS), generator=generator)
    fields["teacher"] = torch.tensor(TEACHERS).float()
    fields["response_mask"] = torch.tensor([[float(token) for token in mask.ljust(3, "0")] for mask in MASKS])
    ids, lengths = torch.arange(len(MASKS)), torch.tensor([len(mask) for mask in MASKS])
    tokens = torch.zeros(int((1 + lengths).sum()), dtype=torch.int64)
    return Rows(ids, ids // 2, torch.ones_like(ids), lengths, tokens, fields)


def written(rows: Rows, name: str, row: int) -> list[float]:
    return [float(x) for x, token in zip(rows.fields[name][row], MASKS[row], strict=False) if token == "1"]


def plain_kl(rows: Rows, row: int, kind: str) -> list[float]:
    """The KL of each token to the row's teacher; 0 without one."""
    if kind == "full":
        found = written(rows, "full_kl", row)
    else:
        pairs = zip(written(rows, "old_log_probs", row), written(rows, "teacher_log_probs", row), strict=True)
        differences = [a - b for a, b in pairs]
        found = differences if kind == "k1" else [math.exp(-x) - 1 + x for x in differences]
    return [x if TEACHERS[row] else 0.0 for x in found]


def plain_rewards(rows: Rows, row: int, config: Config) -> list[float]:
    distillation = config.distillation
    pairs = zip(written(rows, "old_log_probs", row), written(rows, "ref_log_probs", row), strict=True)
    rewards = [-KL_COEF * (a - b) for a, b in pairs]
    if distillation.signal == "reward":
        kl = plain_kl(rows, row, distillation.kl_kind)
        rewards = [reward - COEF * x for reward, x in zip(rewards, kl, strict=True)]
    if distillation.task_reward or not TEACHERS[row]:
        rewards[-1] += float(rows.fields["scores"][row])
    return rewards


def plain_advantages(rows: Rows, row: int, config: Config) -> list[float]:
    rewards, estimator = plain_rewards(rows, row, config), config.algorithm.adv_estimator
    if estimator == "rloo":
        other = row + 1 - 2 * (row % 2)
        found = [sum(rewards) - sum(plain_rewards(rows, other, config))] * len(rewards)
    else:
        values = written(rows, "values", row) if estimator == "gae" else [0.0] * len(rewards)
        lam = 0.8 if estimator == "gae" else 1.0
        found, running, after = [], 0.0, 0.0
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            running = reward + 0.9 * after - value + 0.9 * lam * running
            after = value
            found.insert(0, running)
    if config.distillation.signal == "advantage":
        kl = plain_kl(rows, row, config.distillation.kl_kind)
        found = [a - COEF * x for a, x in zip(found, kl, strict=True)]
    return found


def check(rank: int, world_size: int) -> None:
    every, exchange = make_rows(), Exchange(dist.group.WORLD)
    for signal, kind, estimator, task_reward in CASES:
        config = make_config(signal, kind, estimator, task_reward=task_reward)
        progress = SimpleNamespace(kl=KLController(config.algorithm.kl_ctrl), reward_moments=RunningMoments())
        result = add_advantages(config, exchange, progress, 1, at_owners(exchange, every), {})
        rows, metrics = result.batch.rows, result.metrics
        for i, row in enumerate(rows.ids.tolist()):
            found = rows.fields["advantages"][i][rows.response_mask[i] == 1].tolist()
            expected = plain_advantages(every, row, config)
            assert found == pytest.approx(expected, abs=1e-5), (signal, kind, estimator, task_reward, row)
        for number, name in ((1, "a"), (2, "b")):
            kl = [x for row, own in enumerate(TEACHERS) if own == number for x in plain_kl(every, row, kind)]
            assert metrics[f"distillation/kl/teacher/{name}"] == pytest.approx(sum(kl) / len(kl), rel=1e-4)


def test_rewards_and_advantages_are_what_loops_give() -> None:
    run_ranks(2, check)


GRADIENTS = {"k1+": lambda x: x, "k2": lambda x: x, "k3": lambda x: 1 - math.exp(-x), "full": None}
"""Kind -> the gradient of a token's KL in its log-prob, by the difference x of the log-probs."""


@pytest.mark.parametrize("kind", GRADIENTS)
def test_the_loss_is_the_mean_kl_of_rows_with_a_teacher_however_they_are_cut(kind: str) -> None:
    config, rows = make_config("loss", kind), make_rows()
    rows.fields["advantages"] = torch.zeros(len(MASKS), 3)
    num_tokens = int(rows.response_mask.sum())
    leaf = rows.fields["old_log_probs"].double().requires_grad_()
    full = rows.fields["full_kl"].double().requires_grad_()
    loss_fn, metric = ActorLoss(config, num_tokens, len(rows)), 0.0
    for part in ([1, 7], [0, 2, 3], [5, 4, 6]):
        outputs = {"log_probs": leaf[part], "entropy": torch.ones(len(part), 3), "full_kl": full[part]}
        loss, metrics = loss_fn(outputs, rows.select(part))
        loss.backward()
        metric += float(metrics["actor/distillation_loss"].part[0])
    values = {"k1+": "k1"}
    expected, gradients = 0.0, torch.zeros(len(MASKS), 3, dtype=torch.float64)
    for row, teacher in enumerate(TEACHERS):
        for place, token in enumerate(MASKS[row]):
            if token == "0" or not teacher:
                continue
            x = float(rows.fields["old_log_probs"][row, place] - rows.fields["teacher_log_probs"][row, place])
            value = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}.get(values.get(kind, kind))
            expected += float(rows.fields["full_kl"][row, place]) if value is None else value
            gradients[row, place] = COEF / num_tokens * (1.0 if kind == "full" else GRADIENTS[kind](x))
    assert metric == pytest.approx(expected / num_tokens, rel=1e-5)
    torch.testing.assert_close((full if kind == "full" else leaf).grad, gradients, rtol=1e-5, atol=1e-7)
