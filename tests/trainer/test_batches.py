"""Rows of sampled and scored responses, as they reach the models."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from engine_handles import restarts_of
from reward_pools import load
from samples_of import sample_of
from scored_responses import ScoredResponses, step_of
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.engines.client import EngineError
from megappo.engines.handle import EngineHandle
from megappo.observe.timers import Timers
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.fingerprint import prompt_digest
from megappo.rollouts.journal import Choice, Group, Journal
from megappo.rollouts.rank_groups import SharedCounts
from megappo.rollouts.responses import Responses
from megappo.rollouts.rollouts import Rollouts
from megappo.rollouts.row_builder import RowBuilder, check_tokens
from megappo.rollouts.sample_rows import Sample, Segment
from megappo.trainer.batches import SampledBatches
from megappo.userland.grades import Grade
from megappo.userland.rewards import RewardError
from megappo.userland.signatures import Row


def test_tokens_that_the_critic_does_not_know_are_refused():
    samples = [sample_of(0, 0, [3, 6], [-1.0, -1.0]), sample_of(1, 0, [8], [-1.0], "length")]
    check_tokens(samples, 9)
    check_tokens([], 9)
    with pytest.raises(ConfigError, match="or teachers: the actor wrote token 8, .*vocab_size is 8 "):
        check_tokens(samples, 8)


DATASETS = Datasets(None, (), 30, None, {})
PROMPTS = [Prompt(i, tokens, "", None) for i, tokens in enumerate(([5], [6, 7]))]
SAMPLES = (
    [
        sample_of(1, 1, [11, 12, 13, 14], [-0.5, None, None, -0.25], "length", prompt=[6, 7]),
        sample_of(1, 0, [16, 17], [-2.0, None], prompt=[6, 7]),
    ],
    [],
    [sample_of(0, 0, [15], [-1.0]), sample_of(0, 1, [18, 19], [0.0, -3.0])],
)
"""Samples of each rank; the log-prob is None where an environment wrote the token."""
GREEDY = ([sample_of(0, 0, [15, 20, 21], [-1.0, None, -1.0])], [sample_of(1, 0, [22], [-1.0])], [])
EXPECTED = {
    0: ([5, 15], [1, 0, 0, 0], [-1, 0, 0, 0], 15.0, 0, 0, 15 - 2 / 8),
    1: ([5, 18, 19], [1, 1, 0, 0], [0, -3, 0, 0], 18.0, 0, 0, 15 - 2 / 8),
    2: ([6, 7, 16, 17], [1, 0, 0, 0], [-2, 0, 0, 0], 16.0, 0, 1, 22 - 1 / 8),
    3: ([6, 7, 11, 12, 13, 14], [1, 0, 0, 1], [-0.5, 0, 0, -0.25], 11.0, 1, 1, 22 - 1 / 8),
}
"""Row -> tokens, mask, log-probs, score, truncated, prompt, baseline: a greedy score with its length penalty."""


def scored(samples: list[Sample]) -> Responses:
    """Each by its first token."""
    return ScoredResponses(PROMPTS, samples, [Grade([float(one.tokens[0])], {}) for one in samples])


def by_workers(pool: object, samples: list[Sample]) -> Responses:
    """As the reward function's workers score them."""
    responses = Responses(PROMPTS, pool, Tokenizer())
    responses.add(samples)
    return responses


class Train:
    """The prompts that were drawn."""

    def drawn(self, positions: Sequence[int]) -> list[Prompt]:
        return [PROMPTS[position] for position in positions]


class Greedy(Rollouts):
    """Its engines have written already."""

    def sample(self, prompts: Sequence[Prompt], n: int, *args: object) -> Responses:
        assert (prompts, n) == (PROMPTS, 1)
        return scored(GREEDY[self.exchange.rank])


def write_journal(journal: Journal, samples: Sequence[Sample]) -> None:
    """Write what an engine has sampled before the run was ended."""
    for position in {one.prompt_index for one in samples}:
        group = Group(position, 0, prompt_digest(PROMPTS[position]))
        for sample in [one for one in samples if one.prompt_index == position]:
            journal.write_sample(group, sample)
            group.samples.append(replace(sample, grade=Grade([float(sample.tokens[0])], {})))
        journal.write_grades(group)


def make_config(**algorithm: object) -> Config:
    penalty = {} if algorithm["adv_estimator"] == "gdpo" else {"length_penalty": "linear", "length_penalty_factor": 1.0}
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["f"], "train_batch_size": 2},
            "trainer": {"output_dir": "o"},
            "rollout": {"n": 2, "max_response_length": 8},
            "reward": {"function": "rewards.py:f"} | penalty,
            "algorithm": algorithm,
        }
    )


def collect(rank: int, world_size: int, folder: str) -> None:
    """A run that is started again finds the groups, and the choice, of its next step."""
    config = make_config(adv_estimator="remax")
    exchange = Exchange(dist.group.WORLD)
    datasets, restarts = replace(DATASETS, train=Train()), restarts_of(EngineHandle(rank), exchange)
    rollouts = Greedy(config, datasets, restarts, exchange, workers={}, num_engines=3)
    journal = Journal(Path(folder), rank, world_size, {})
    write_journal(journal, SAMPLES[rank])
    if rank == 0:
        journal.write_choice(Choice(1, [0, 1], [], 1))
    batches = SampledBatches(datasets, rollouts, lambda: None, num_drawn=2, journal=journal)
    batches.groups._shared = SharedCounts(dist.HashStore(), 2)  # which ranks without engines lack
    batches.restore(SimpleNamespace(pending=[0, 1], start_step=0, sampled_step=0, is_new=False))
    assert batches.pending == [0, 1]
    timers = Timers()
    batch, metrics = batches.score(1, batches.sample(1, timers), timers)
    assert batch.owners == ((), (0, 1), (2, 3)) and batch.rows.ids.tolist() == list(batch.owners[rank])
    rows = batch.rows
    found = zip(
        [tokens.tolist() for tokens in rows.sequences],
        rows.response_mask.tolist(),
        *(rows.fields[name].tolist() for name in ("rollout_log_probs", "scores", "truncated")),
        rows.prompt_ids.tolist(),
        rows.fields["baselines"].tolist(),
        strict=True,
    )
    assert list(found) == [EXPECTED[row] for row in batch.owners[rank]]
    assert batch.table.policy_lengths.tolist() == [1, 2, 1, 2] and batch.table.response_lengths.tolist() == [1, 2, 2, 4]
    assert (metrics["rollout/num_tokens"], metrics["rollout/engine_restarts"]) == (6 + 3, 0)
    assert metrics["rollout/tokens_per_second"] > 0 and batches.pending == []
    assert "score_components" not in rows.fields, "there is one score of each"
    with pytest.raises(EngineError, match="expected 2 responses to each of 2 prompts, got 3 in all"):
        fewer = SAMPLES[rank][: 1 + (rank == 0)]
        RowBuilder(config, 30, None, exchange).build(step_of(scored(fewer)))


def test_segments_of_policy_and_environment_become_rows_at_their_owners(tmp_path):
    run_ranks(3, collect, str(tmp_path))


MASKED = {
    "gae": ({"adv_estimator": "gae"}, {}, [1, 2, 1, 0]),
    "compared by the estimator": ({"adv_estimator": "rloo"}, {}, [1, 2, 0, 0]),
    "compared to be normalised": ({"adv_estimator": "gae"}, {"normalize": "group"}, [1, 2, 0, 0]),
    "all": ({"adv_estimator": "gae"}, {}, [0, 0, 0, 0]),
}
"""Ways to mask truncated responses: the settings, and the number of tokens that remain in each row."""


def mask(rank: int, world_size: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    for name, (algorithm, reward, expected) in MASKED.items():
        config = make_config(**algorithm, mask_truncated=True)
        config = config.model_copy(update={"reward": config.reward.model_copy(update=reward)})
        ending = {"ending": "length"} if name == "all" else {}
        samples = [replace(one, **ending) for one in chain(*SAMPLES) if one.prompt_index == rank]
        batch, _ = RowBuilder(config, 30, None, exchange).build(step_of(scored(samples)))
        assert batch.table.policy_lengths.tolist() == expected, name


def test_truncated_responses_are_masked_and_the_one_that_is_left_where_they_are_compared():
    """A step of which nothing is left is trained on, too: its losses are 0."""
    run_ranks(3, mask)


class Scores:
    """In place of a pool of workers: a text has as many scores as it has numbers, in their order. Some have
    a part `large`."""

    on_error, failure, waits_for_all = "raise", "", False

    def begin(self) -> "Scores":
        self.texts = []
        return self

    def add(self, rows: Sequence[Row]) -> None:
        self.texts += [row.response for row in rows]

    def results(self) -> list[Grade]:
        of_texts = [[float(number) for number in text.split()] for text in self.texts]
        return [Grade(numbers, {"large": max(numbers)} if max(numbers) > 8 else {}) for numbers in of_texts]


class Tokenizer:
    def batch_decode(self, tokens: Sequence[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, of_sample)) for of_sample in tokens] or [""]  # as transformers' does


def samples_of(*tokens: list[int]) -> list[Sample]:
    return [sample_of(i // 2, i % 2, written, [-1.0] * len(written)) for i, written in enumerate(tokens)]


def score_by_components(rank: int, world_size: int) -> None:
    """Rank 0 has no engine, and takes rows all the same; rank 2's wrote nothing."""
    exchange = Exchange(dist.group.WORLD)
    config = make_config(adv_estimator="gdpo", use_kl_in_reward=False)
    pool = Scores() if rank else None
    builder = RowBuilder(config, 30, Tokenizer(), exchange)
    samples = samples_of([1, 20], [2, 7], [3, 20], [4, 9])
    mine = ([], samples, [])[rank]
    batch, metrics = builder.build(step_of(by_workers(pool, mine)))
    assert metrics["reward/part/large"] == (20 + 20 + 9) / 3, "of the responses that have it"
    rows = batch.rows
    expected = {0: [1.0, 20.0], 1: [2.0, 7.0], 2: [3.0, 20.0], 3: [4.0, 9.0]}
    assert rows.field("score_components").tolist() == [expected[row] for row in rows.ids.tolist()]
    assert rows.field("score_components").shape == (len(rows), 2)
    assert rows.field("scores").tolist() == [sum(expected[row]) for row in rows.ids.tolist()]
    message = r"reward function rewards.py:f returned different numbers of scores \(2, 3\); expected the same number"
    with pytest.raises(RewardError, match=message):  # another step's
        builder.build(step_of(by_workers(pool, samples_of([1, 2, 3]) if rank == 1 else [])))
    builder = RowBuilder(config, 30, Tokenizer(), exchange)
    with pytest.raises(RewardError, match=r"returned different numbers of scores \(1, 2\)"):  # another rank's
        builder.build(step_of(by_workers(pool, samples_of([1] * rank) if rank else [])))
    builder = RowBuilder(config, 30, Tokenizer(), exchange)
    with pytest.raises(ConfigError, match="reward.function rewards.py:f returned one score .* such as grpo"):
        builder.build(step_of(by_workers(pool, samples_of([1]) if rank else [])))


def test_several_scores_of_a_response_reach_its_owner_and_add_up():
    run_ranks(3, score_by_components)


ONLY_ONES = """
def f(prompts, responses, labels):
    if any(not response.startswith("1") for response in responses): raise KeyError("no such answer")
    return [[0.25, 0.5] for response in responses]
"""


def score_where_a_function_fails(rank: int, world_size: int, folder: str) -> None:
    """One turn of each episode, with a reward of its own."""
    exchange, config = Exchange(dist.group.WORLD), make_config(adv_estimator="grpo")
    segments = [Segment([5], [first, 7], [-1.0, -1.0], [0.0, 3.0], [1, 1]) for first in (1, 2)]
    samples = [Sample(prompt, i, [one], "done", {}) for prompt in (0, 1) for i, one in enumerate(segments)]
    with load(Path(folder), ONLY_ONES, on_error="zero") as pool:
        responses = step_of(by_workers(pool, samples))
        batch, metrics = RowBuilder(config, 30, Tokenizer(), exchange).build(responses)
    assert batch.rows.field("score_components").tolist() == [[3.0, 0.25, 0.5], [3.0, 0.0, 0.0]] * 2
    assert metrics["reward/errors"] == 2


def test_an_environments_rewards_stay_where_a_reward_function_fails(tmp_path):
    run_ranks(1, score_where_a_function_fails, str(tmp_path))
