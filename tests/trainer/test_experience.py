"""From rows at their owners on two ranks to advantages, against plain loops over all rows.

A filter has left some of the rows, so prompts have two, three and four; an environment wrote some of their tokens.
"""

import itertools
import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ppo_engines import at_owners
from spawn import run_ranks

from megappo.batch.exchange import Batch, Exchange
from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.ppo.kl import KLController
from megappo.ppo.reward_shaping import RunningMoments
from megappo.trainer import experience
from megappo.trainer.experience import add_advantages
from megappo.trainer.run import Run

SAMPLED = (
    *((1, "111"), (1, "1")),
    *((2, "11"), (2, "1")),
    *((4, "101"), (4, "111"), (4, "1"), (4, "011")),
    *((7, "110"), (7, "11"), (7, "1"), (7, "111")),
)
"""Prompt and mask of each row; 1 in the mask is a token of the policy's."""
KEPT = (0, 1, 4, 6, 7, 8, 9, 10, 11)
PROMPTS, WRITTEN = zip(*(SAMPLED[row] for row in KEPT), strict=True)
LENGTHS = tuple(written.count("1") for written in WRITTEN)
MAX_LENGTH = 4
PER_TOKEN = ("old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "full_kl")
METHODS = {
    "gae": {},
    "decoupled gae": {"critic_lam": 1.0, "lam_alpha": 0.5, "bootstrap_truncated": True, "advantages_clip": 0.9},
    "not whitened": {"whiten_advantages": False, "kl_penalty": "k2"},
    "full KL": {"kl_penalty": "full"},
    "grpo": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "dr. grpo": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},
    "rloo": {"adv_estimator": "rloo"},
    "reinforce++": {"adv_estimator": "reinforce_plus_plus"},
    "reinforce++ baseline": {"adv_estimator": "reinforce_plus_plus_baseline"},
    "opo": {"adv_estimator": "opo"},
    "gpg": {"adv_estimator": "gpg"},
    "gdpo": {"adv_estimator": "gdpo", "use_kl_in_reward": False},
    "gdpo without deviations": {
        **{"adv_estimator": "gdpo", "use_kl_in_reward": False},
        **{"norm_adv_by_std_in_grpo": False, "whiten_advantages": False},
    },
    "groups' rewards": {"adv_estimator": "rloo"},
    "all ranks' rewards": {"adv_estimator": "rloo"},
    "remax": {"adv_estimator": "remax"},
    "reinforce++ of nemo_rl": {"adv_estimator": "reinforce_plus_plus", "preset": "nemo_rl"},
    "reinforce++ of slime": {"adv_estimator": "reinforce_plus_plus", "preset": "slime"},
    "gae of nemo_rl": {"preset": "nemo_rl"},
    "rloo of openrlhf": {"adv_estimator": "rloo", "preset": "openrlhf"},
    "grpo of openrlhf": {"adv_estimator": "grpo", "preset": "openrlhf", "kl_penalty": "k2"},
    "reinforce++ baseline of openrlhf": {"adv_estimator": "reinforce_plus_plus_baseline", "preset": "openrlhf"},
    "reinforce++ baseline of nemo_rl": {"adv_estimator": "reinforce_plus_plus_baseline", "preset": "nemo_rl"},
    "reinforce++ baseline of slime": {"adv_estimator": "reinforce_plus_plus_baseline", "preset": "slime"},
    "dr. grpo of miles": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False, "preset": "miles"},
    "rloo of verl": {"adv_estimator": "rloo", "preset": "verl"},
    "engine's log-probs": {"old_log_probs": "engine"},
    "corrected": {"rollout_correction": {"level": "token", "threshold": 1.1}},
}


NORMALIZE = {"groups' rewards": "group", "all ranks' rewards": "batch"}


def make_config(algorithm: dict, normalize: str = "none") -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["f"], "train_batch_size": 4},
            "trainer": {"output_dir": "o"},
            "rollout": {"n": 2, "max_response_length": MAX_LENGTH},
            "reward": {"normalize": normalize, "scale": 2.0, "length_penalty": "linear", "length_penalty_factor": 0.4},
            "algorithm": {"gamma": 0.9, "lam": 0.8, "kl_ctrl": {"kl_coef": 0.3}} | algorithm,
        }
    )


def make_rows() -> Rows:
    """All that were sampled, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    prompts, written = zip(*SAMPLED, strict=True)
    ids, lengths = torch.arange(len(SAMPLED)), torch.tensor([len(mask) for mask in written])
    mask = torch.tensor([[float(token) for token in mask.ljust(3, "0")] for mask in written])
    fields = {name: torch.randn(len(SAMPLED), 3, generator=generator) for name in PER_TOKEN}
    per_row = {name: torch.randn(len(SAMPLED), generator=generator) for name in ("scores", "bootstrap_values")}
    per_row["score_components"] = torch.randn(len(SAMPLED), 3, generator=generator) * torch.tensor([1.0, 10.0, 0.1])
    baselines = torch.randn(8, generator=generator)[list(prompts)]
    truncated = torch.tensor([1.0, 0.0] * (len(SAMPLED) // 2))
    fields |= {"response_mask": mask, "baselines": baselines, "truncated": truncated} | per_row
    tokens = torch.zeros(int((1 + lengths).sum()), dtype=torch.int64)
    return Rows(ids, torch.tensor(prompts), torch.ones_like(ids), lengths, tokens, fields)


def on_policy_tokens(values: torch.Tensor, row: int) -> list[float]:
    return [float(value) for value, token in zip(values, WRITTEN[row], strict=False) if token == "1"]


def values_of(rows: Rows, name: str, row: int) -> list[float]:
    return on_policy_tokens(rows.fields[name][row], row)


def answers(row: int) -> list[int]:
    """The rows that answer the same prompt."""
    return [other for other, prompt in enumerate(PROMPTS) if prompt == PROMPTS[row]]


def deviation(scores: list[float]) -> float:
    mean = sum(scores) / len(scores)
    return math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))


def plain_score(rows: Rows, row: int, config: Config) -> float:
    compared = answers(row) if config.reward.normalize == "group" else range(len(PROMPTS))
    scores = {other: 2.0 * float(rows.fields["scores"][other]) for other in compared}
    if config.reward.normalize == "none":
        return scores[row]
    found = list(scores.values())
    return (scores[row] - sum(found) / len(found)) / (deviation(found) + 1e-6)


def plain_penalty(rows: Rows, row: int, config: Config) -> list[float]:
    """The KL of each token, with its coefficient."""
    if not config.algorithm.use_kl_in_reward:
        return [0.0] * LENGTHS[row]
    is_engines = config.algorithm.old_log_probs == "engine"
    names = ("rollout_log_probs" if is_engines else "old_log_probs", "ref_log_probs")
    old, ref = (values_of(rows, name, row) for name in names)
    kl = {
        "k1": [a - b for a, b in zip(old, ref, strict=True)],
        "k2": [(a - b) ** 2 / 2 for a, b in zip(old, ref, strict=True)],
        "full": values_of(rows, "full_kl", row),
    }[config.algorithm.kl_penalty]
    return [0.3 * x for x in kl]


def plain_rewards(rows: Rows, row: int, config: Config) -> list[float]:
    length = LENGTHS[row]
    rewards = [-x for x in plain_penalty(rows, row, config)]
    rewards[-1] += plain_score(rows, row, config) - 0.4 * length / MAX_LENGTH
    return rewards


def plain_gae(rewards: list[float], values: list[float], after: float, gamma: float, lam: float) -> list[float]:
    advantages, running = [], 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + gamma * after - value + gamma * lam * running
        after = value
        advantages.insert(0, running)
    return advantages


def plain_gdpo(rows: Rows, row: int, config: Config) -> float:
    """Expect of each score its difference within its group; nothing that shapes the sum has a part in it."""
    total = 0.0
    for column in range(3):
        scores = {other: float(rows.fields["score_components"][other, column]) for other in answers(row)}
        scale = deviation(list(scores.values())) + 1e-6 if config.algorithm.norm_adv_by_std_in_grpo else 1.0
        total += (scores[row] - sum(scores.values()) / len(scores)) / scale
    return total


def plain_without_values(rows: Rows, row: int, config: Config) -> list[float]:
    algorithm, length, others = config.algorithm, LENGTHS[row], answers(row)
    rewards = plain_rewards(rows, row, config)
    if algorithm.adv_estimator == "gdpo":
        return [plain_gdpo(rows, row, config)] * length
    if algorithm.adv_estimator == "remax":
        return [sum(rewards[t:]) - float(rows.fields["baselines"][row]) for t in range(length)]
    if algorithm.adv_estimator == "reinforce_plus_plus":
        return [sum(0.9 ** (s - t) * rewards[s] for s in range(t, length)) for t in range(length)]
    in_score = algorithm.preset in (None, "verl")  # the KL, and so before the comparison
    scores = {other: sum(plain_rewards(rows, other, config)) for other in others}
    if not in_score:
        scores = {other: score + sum(plain_penalty(rows, other, config)) for other, score in scores.items()}
    mean, own = sum(scores.values()) / len(others), scores[row]
    weighted = sum(LENGTHS[other] * scores[other] for other in others) / sum(LENGTHS[other] for other in others)
    without = (sum(scores.values()) - own) / (len(others) - 1)
    scale = deviation(list(scores.values())) + 1e-6 if algorithm.norm_adv_by_std_in_grpo else 1.0
    found = {"grpo": (own - mean) / scale, "rloo": own - without, "opo": own - weighted}
    advantage = found.get(algorithm.adv_estimator, own - mean)
    penalty = [0.0] * length if in_score else plain_penalty(rows, row, config)
    if algorithm.preset == "openrlhf":
        penalty = [sum(penalty[t:]) for t in range(length)]
    return [advantage - x for x in penalty]


def plain_estimate(rows: Rows, row: int, config: Config) -> tuple[list[float], list[float]]:
    """(advantages, returns) of one row before whitening."""
    algorithm, length = config.algorithm, LENGTHS[row]
    rewards = plain_rewards(rows, row, config)
    if not config.has_values:
        return plain_without_values(rows, row, config), []
    values = values_of(rows, "values", row)
    truncated = bool(rows.fields["truncated"][row]) and algorithm.bootstrap_truncated
    after = float(rows.fields["bootstrap_values"][row]) if truncated else 0.0
    lam = algorithm.lam if algorithm.lam_alpha is None else min(max(1 - 1 / (algorithm.lam_alpha * length), 0), 1)
    critic_lam = algorithm.lam if algorithm.critic_lam is None else algorithm.critic_lam
    returns = [a + v for a, v in zip(plain_gae(rewards, values, after, 0.9, critic_lam), values, strict=True)]
    return plain_gae(rewards, values, after, 0.9, lam), returns


def plain(rows: Rows, config: Config) -> tuple[list[list[float]], list[list[float]]]:
    found = [plain_estimate(rows, row, config) for row in range(len(LENGTHS))]
    advantages, returns = [a for a, _ in found], [r for _, r in found]
    is_whitened = config.algorithm.adv_estimator.startswith(("gae", "reinforce_plus_plus", "gdpo"))
    if is_whitened and config.algorithm.whiten_advantages is None:
        every = [x for part in advantages for x in part]
        mean = sum(every) / len(every)
        is_biased = config.algorithm.preset == "openrlhf"
        is_biased |= config.algorithm.preset == "nemo_rl" and config.algorithm.adv_estimator != "gae"
        deviation = math.sqrt(sum((x - mean) ** 2 for x in every) / (len(every) - (0 if is_biased else 1)))
        advantages = [[(x - mean) / deviation for x in part] for part in advantages]
    limit = config.algorithm.advantages_clip or math.inf
    return [[min(max(x, -limit), limit) for x in part] for part in advantages], returns


def filtered(exchange: Exchange) -> Batch:
    """Return the remaining rows, with new numbers."""
    rows = at_owners(exchange, make_rows()).rows
    batch = exchange.number(rows.select([i for i, row in enumerate(rows.ids.tolist()) if row in KEPT]))
    table = batch.table
    assert tuple(table.prompt_ids.tolist()) == PROMPTS and tuple(table.policy_lengths.tolist()) == LENGTHS
    return batch


def check(rank: int, world_size: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    every, batch = make_rows().select(KEPT), filtered(exchange)
    owned = batch.rows
    for name, algorithm in METHODS.items():
        config = make_config(algorithm, NORMALIZE.get(name, "none"))
        kl = KLController(config.algorithm.kl_ctrl)
        progress = SimpleNamespace(kl=kl, reward_moments=RunningMoments())
        is_engines = config.algorithm.old_log_probs == "engine"
        absent = {"bootstrap_values"} if "decoupled" not in name else set()
        absent |= {"old_log_probs", "full_kl"} if is_engines else set()
        kept = {key: x for key, x in owned.fields.items() if key not in absent}
        result = add_advantages(config, exchange, progress, 1, replace(batch, rows=replace(owned, fields=kept)), {})
        rows, metrics = result.batch.rows, result.metrics
        if not is_engines:
            assert_compared(every, metrics)
        assert metrics.get("reward/kl_penalty/mean") == result.kl_penalty
        advantages, returns = plain(every, config)
        for i, row in enumerate(owned.ids.tolist()):
            for field, expected in {
                "advantages": advantages,
                **({"returns": returns} if config.has_values else {}),
            }.items():
                assert on_policy_tokens(rows.fields[field][i], row) == pytest.approx(expected[row], abs=1e-5), name
                assert not rows.fields[field][i][rows.response_mask[i] == 0].any()
        assert ("critic/vf_explained_var" in metrics) == ("returns" in rows.fields) == config.has_values
        if config.has_values:
            residuals = [
                value - expected
                for row, of_row in enumerate(returns)
                for value, expected in zip(values_of(every, "values", row), of_row, strict=True)
            ]
            variance = statistics.variance(sum(returns, []))
            explained = 1.0 - statistics.variance(residuals) / (variance + 1e-5)
            assert metrics["critic/vf_explained_var"] == pytest.approx(explained, rel=1e-4), name
        assert metrics.get("reward/kl_coef") == (0.3 if config.algorithm.use_kl_in_reward else None)
        assert ("advantages/clipped/mean" in metrics) == (config.algorithm.advantages_clip is not None)
        assert_weights(name, every, rows)


def assert_compared(every: Rows, metrics: dict[str, float]) -> None:
    expected = [
        abs(old - rollout)
        for row in range(len(LENGTHS))
        for old, rollout in zip(
            values_of(every, "old_log_probs", row), values_of(every, "rollout_log_probs", row), strict=True
        )
    ]
    assert metrics["rollout/log_prob_diff/mean"] == pytest.approx(statistics.fmean(expected))
    assert metrics["rollout/log_prob_diff/max"] == pytest.approx(max(expected))
    assert "rollout_is/mean" in metrics


def assert_weights(name: str, every: Rows, rows: Rows) -> None:
    assert ("rollout_is_weights" in rows.fields) == (name == "corrected")
    for i, row in enumerate(rows.ids.tolist() if name == "corrected" else []):
        pairs = zip(values_of(every, "old_log_probs", row), values_of(every, "rollout_log_probs", row), strict=True)
        expected = [min(math.exp(old - rollout), 1.1) for old, rollout in pairs]
        assert on_policy_tokens(rows.fields["rollout_is_weights"][i], row) == pytest.approx(expected, rel=1e-5)


def test_every_method_gives_what_loops_over_all_rows_give() -> None:
    run_ranks(2, check)


def compared(rank: int, world_size: int) -> None:
    """Weights that are normalised over all ranks cost a message, which the comparison of the engines reuses."""
    config = make_config({"rollout_correction": {"level": "token", "normalize": True}})
    progress = SimpleNamespace(kl=KLController(config.algorithm.kl_ctrl), reward_moments=RunningMoments())
    progress.experience, progress.begin = None, lambda experience, batches: None
    exchange, checked, calls = Exchange(dist.group.WORLD), [], []
    engines = SimpleNamespace(check_rollouts=lambda metrics: checked.append(dict(metrics)) or {"warnings": 0})
    run = SimpleNamespace(progress=progress, engines=engines, batches=None)
    weights = experience.rollout_is_weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experience, "rollout_is_weights", lambda *args, **more: calls.append(1) or weights(*args, **more))
        batch = at_owners(exchange, make_rows())
        result, _ = Run.experience(
            run, 1, lambda run, step: (add_advantages(config, exchange, progress, step, batch, {}), {})
        )
    assert len(calls) == 1
    assert [one["rollout/log_prob_diff/mean"] > 0 for one in checked] == [True] and result.metrics["warnings"] == 0


def test_a_step_compares_engines_and_trainer_once() -> None:
    run_ranks(2, compared)


LEFT = {
    "all are masked": [],
    "all of one rank are masked": [(4, 0), (4, 1), (5, 0)],
    "one response is left": [(0, 0), (0, 1), (0, 2)],
    "one token is left": [(5, 1)],
}
"""Row of `SAMPLED` and position of each token that is still trained on; a prompt's rows are on one rank."""


def degenerate(rank: int, world_size: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    every = make_rows()
    for case, (name, algorithm) in itertools.product(LEFT, METHODS.items()):
        config = make_config(algorithm)
        # Where responses are compared one that is alone is masked, too.
        alone = config.algorithm.method.compares_responses and case != "all of one rank are masked"
        left = torch.zeros(len(SAMPLED), 3)
        for row, place in [] if alone else LEFT[case]:
            left[row, place] = 1.0
        fields = every.fields | {"response_mask": left}
        batch = at_owners(exchange, replace(every, fields=fields))
        mine = batch.rows
        progress = SimpleNamespace(kl=KLController(config.algorithm.kl_ctrl), reward_moments=RunningMoments())
        result = add_advantages(config, exchange, progress, 1, batch, {})
        num_tokens = int(left.sum())
        assert result.metrics["rollout/trained_tokens"] == num_tokens
        assert result.metrics["rollout/masked_frac"] == pytest.approx(1 - len(left.sum(1).nonzero()) / len(SAMPLED))
        assert (result.kl_penalty is None) == (num_tokens == 0 or not config.algorithm.use_kl_in_reward)
        assert math.isfinite(result.metrics.get("rollout/log_prob_diff/mean", 0.0))
        if config.has_values:
            assert math.isnan(result.metrics["critic/vf_explained_var"]) == (num_tokens < 2)
        for field in ("advantages", "returns") if config.has_values else ("advantages",):
            found = result.batch.rows.fields[field]
            assert found.shape == mine.response_mask.shape and found.isfinite().all(), (case, name)
            assert not found[mine.response_mask == 0].any()
        whitens = config.algorithm.whiten_advantages
        if num_tokens == 1 and (config.algorithm.method.whitens if whitens is None else whitens):
            assert not result.batch.rows.fields["advantages"].any()


def test_a_step_of_hardly_any_token_or_none_is_defined_and_counted() -> None:
    """Every method; before, whitening, the means of metrics and the explained variance ended the run."""
    run_ranks(2, degenerate)


def credit(rank: int, world_size: int) -> None:
    """An episode of two segments and three turns, each with reward 1, to which the reward function adds 0.5."""
    mask = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    fields = {
        "response_mask": mask,
        "turn_rewards": mask.clone(),
        "scores": torch.full((2,), 3.5),
        "episodes": torch.zeros(2),
        "segments": torch.tensor([0.0, 1.0]),
        "turns": mask * torch.tensor([[1.0], [2.0]]),
        **dict.fromkeys(("old_log_probs", "rollout_log_probs"), torch.zeros(2, 3)),
    }
    ids, lengths = torch.arange(2), torch.tensor([3, 1])
    tokens = torch.zeros(int((1 + lengths).sum()), dtype=torch.int64)
    rows = Rows(ids, torch.zeros_like(ids), torch.ones_like(ids), lengths, tokens, fields)
    method = {"adv_estimator": "reinforce_plus_plus", "gamma": 1.0, "whiten_advantages": False}
    config = make_config(method | {"use_kl_in_reward": False})
    progress = SimpleNamespace(kl=KLController(config.algorithm.kl_ctrl), reward_moments=RunningMoments())
    exchange = Exchange(dist.group.WORLD)
    batch = at_owners(exchange, rows)
    found = add_advantages(config, exchange, progress, 1, batch, {}).batch.rows.fields["advantages"]
    last = 2.0 * (1 + 0.5) - 0.4 * 3 / MAX_LENGTH
    assert found[mask.bool()].tolist() == pytest.approx([4.0 + last, 2.0 + last, last])


TURN_MASK, TURNS = [1, 1, 0, 1, 1, 1, 0, 1], [1, 1, 0, 2, 2, 2, 0, 3]


def kl_beside_turns(rank: int, world_size: int) -> None:
    """Turns get the score by a recurrence over turns; each token's KL is subtracted from its own advantage."""
    keys = {"gae_level": "turn", "whiten_advantages": False, "gamma": 0.9, "lam": 0.8, "kl_ctrl": {"kl_coef": 0.3}}
    config = Config.model_validate(
        {
            **{"model": {"path": "m"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}},
            **{"algorithm": keys, "rollout": {"environment": "game.py:Game"}},
        }
    )
    progress = SimpleNamespace(kl=KLController(config.algorithm.kl_ctrl), reward_moments=RunningMoments())
    generator = torch.Generator().manual_seed(4)
    one, mask = torch.ones(1, dtype=torch.int64), torch.tensor([TURN_MASK]).float()
    old, ref, values = torch.randn(3, 1, 8, generator=generator)
    fields = {"response_mask": mask, "turns": torch.tensor([TURNS]).float(), "scores": torch.tensor([2.0])}
    fields |= {"old_log_probs": old, "ref_log_probs": ref, "rollout_log_probs": old, "values": values}
    rows = Rows(0 * one, 0 * one, one, 8 * one, torch.zeros(9, dtype=torch.int64), fields)
    exchange = Exchange(dist.group.WORLD)
    found = add_advantages(config, exchange, progress, 1, at_owners(exchange, rows), {}).batch.rows.fields
    of_turns, following, running = {}, 0.0, 0.0
    for turn in (3, 2, 1):
        value = float(values[0, TURNS.index(turn)])
        running = (2.0 if turn == 3 else 0.0) + 0.9 * following - value + 0.9 * 0.8 * running
        following, of_turns[turn] = value, (running, running + value)
    for t, turn in enumerate(TURNS):
        advantage, target = of_turns.get(turn, (0.0, 0.0))
        kl = 0.3 * float(old[0, t] - ref[0, t]) if turn else 0.0
        assert float(found["advantages"][0, t]) == pytest.approx(advantage - kl, abs=1e-5)
        assert float(found["returns"][0, t]) == pytest.approx(target, abs=1e-5)


def test_the_kl_stays_out_of_the_recurrence_over_turns() -> None:
    run_ranks(1, kl_beside_turns)


def test_each_turn_has_the_credit_that_is_its_own() -> None:
    """At each token of the policy: the sum of the scaled rewards still to come."""
    run_ranks(1, credit)
