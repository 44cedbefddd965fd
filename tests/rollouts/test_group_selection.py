"""Choose groups, compared with a plain loop over all responses of all ranks."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from samples_of import sample_of
from scored_responses import ScoredResponses
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.config.sections import FilterGroups
from megappo.data.prompts import Prompt
from megappo.observe.metrics import Metric
from megappo.rollouts.group_selection import GroupQuota, choose_groups
from megappo.rollouts.responses import Responses
from megappo.rollouts.sampler import EngineUsage, store_counter
from megappo.userland.grades import Grade
from megappo.userland.rewards import PendingRow, RewardError, Scoring
from megappo.userland.signatures import Row

SIZE, NUM_ROUNDS, N = 6, 4, 3
PROMPTS = [Prompt(i, [1], "", None) for i in range(SIZE)]


def scores_of(seed: int) -> list[list[list[float]]]:
    """Scores by round, prompt and response; about half of the groups have equal ones."""
    rng = random.Random(seed)
    return [
        [[float(rng.random() < 0.5)] * N if rng.random() < 0.5 else [0.0, 1.0, 0.5] for _ in range(SIZE)]
        for _ in range(NUM_ROUNDS)
    ]


@contextmanager
def noted(order: list[str], phase: str) -> Iterator[None]:
    order.append(phase)
    yield
    order.append(f"after {phase}")


def choose(rank: int, world_size: int) -> None:
    """The responses to a prompt are at one rank, of which rank 0 has none."""
    exchange = Exchange(dist.group.WORLD)
    for seed in range(20):
        scores, asked = scores_of(seed), []

        def draw(asked: list = asked) -> list[Prompt]:
            asked.append([Prompt(100 * len(asked) + i, [1], "", None) for i in range(SIZE)])
            return asked[-1]

        def sample(prompts: list[Prompt], num_groups: int, scores: list = scores) -> Responses:
            mine = [i for i in range(SIZE) if 1 + i % 2 == rank]
            keys = [(i, j) for i in reversed(mine) for j in range(N)]
            samples = [sample_of(i, j, [prompts[i].index, j], [-1.0, None]) for i, j in keys]
            of_round = scores[prompts[0].index // 100]
            grades = [Grade([of_round[one.prompt_index][one.sample_index]], {}) for one in samples]
            counts = {"errors": Metric.of(1, "sum")} if rank else {}
            return ScoredResponses(prompts, samples, grades, EngineUsage(1.0, 2.0, 3, rank, len(samples)), counts)

        order = []
        phase = partial(noted, order)
        filters = FilterGroups(enable=True, max_num_gen_batches=3)
        chosen = choose_groups(sample, draw, exchange, SIZE, phase, filters=filters)
        expected, others, rounds = [], [], 0
        while len(expected) < SIZE and rounds < 3:
            for i, group in enumerate(scores[rounds]):
                (expected if len(set(group)) > 1 else others).append((rounds, i))
            rounds += 1
        assert order == ["rollout", "after rollout", "reward", "after reward"] * rounds
        usage = [metric.part for metric in chosen.engine_metrics().values()]
        assert usage == [(2.0 * rounds, rounds), (rank * rounds, 3 * rounds)], "of all rounds"
        taken = (expected + others)[:SIZE]
        assert [prompt.index for prompt in chosen.prompts] == [100 * number + i for number, i in taken]
        assert chosen.metrics == {
            "filter_groups/num_gen_batches": rounds,
            "filter_groups/equal_groups": len(others),
            "filter_groups/equal_groups_kept": max(0, SIZE - len(expected)),
            "filter_groups/surplus_groups": max(0, len(expected) - SIZE),
        }
        assert chosen.num_dropped_tokens == N * (SIZE * rounds - SIZE)
        chosen.fill_grades()
        found = [one for of_rank in exchange.all_gather(chosen.samples) for one in of_rank]
        assert len(found) == N * SIZE
        for written in found:
            number, i = taken[written.prompt_index]
            assert written.tokens == [100 * number + i, written.sample_index]
            assert written.grade.scores == [scores[number][i][written.sample_index]]
        if rank:
            assert chosen.failure_metrics()["errors"].value == rounds, "of what was dropped, too"


def test_groups_whose_scores_differ_are_chosen_in_order():
    run_ranks(3, choose)


def choose_by_part(rank: int, world_size: int) -> None:
    parts = [{"acc": 0.0}, {"acc": 1.0}, {}]
    samples = [sample_of(i // 2, i % 2, [1], [-1.0]) for i in range(4)]

    def chosen(of_samples: list[dict], metric: str) -> list[int]:
        grades = [
            Grade([float(i)], of_sample) if of_sample else Grade([], {}, failed=True)
            for i, of_sample in enumerate(of_samples)
        ]
        prompts = [Prompt(i, [1], "", None) for i in range(2)]
        filters = FilterGroups(enable=True, metric=metric, max_num_gen_batches=1)
        found = choose_groups(
            lambda prompts, num_groups: ScoredResponses(prompts, list(map(replace, samples)), grades),
            lambda: prompts,
            Exchange(dist.group.WORLD),
            1,
            nullcontext,
            filters=filters,
        )
        return [prompt.index for prompt in found.prompts]

    zero, one, failed = parts
    assert chosen([zero, zero, zero, one], "acc") == [1]
    assert chosen([zero, zero, zero, one], "score") == [0]
    assert chosen([zero, failed, zero, one], "acc") == [1]
    for metric in ("acc", "score"):
        assert chosen([failed, failed, failed, one], metric) == [0], "what failed makes no difference"
    with pytest.raises(RewardError, match="filter_groups.metric accuracy: the reward .* no such .*, but score, acc\n"):
        chosen([zero, zero, zero, one], "accuracy")


def test_a_number_beside_the_score_may_be_what_differs():
    run_ranks(1, choose_by_part)


class Tokenizer:
    def batch_decode(self, tokens: Sequence[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return [str(one) for one in tokens]


class Workers:
    """Stands in the place of a reward function's workers: tests settle what they find."""

    def __init__(self, names: list[str]):
        self.names = names

    def put(self, rows: Sequence[Row]) -> list[list[PendingRow]]:
        return [[PendingRow(row) for _ in self.names] for row in rows]

    def check(self) -> None:
        pass


def known(rank: int, world_size: int) -> None:
    """Groups of two, at both ranks, are scored one after the other."""
    scorings = [Scoring(Workers(names)) for names in (["f"], ["f", "g"])]
    store = dist.distributed_c10d._get_default_store()
    for number, scoring in enumerate(scorings):
        responses = Responses(PROMPTS, SimpleNamespace(begin=lambda scoring=scoring: scoring), Tokenizer())
        quota = GroupQuota(3, ("score", "acc")[number], store_counter(store, f"quota {number}"))
        for i in range(2):
            group = [sample_of(i, j, [1], [-1.0]) for j in range(2)]
            quota.add(group, partial(responses.fill_if_scored, responses.add(group)))

        def settle(row: int, score: float, scoring: Scoring = scoring) -> None:
            for function, pending in enumerate(scoring._pending[row]):
                pending.outcome = Grade([score], {"acc": score} if function else {})

        assert not quota.is_met()
        for row, score in ((0, 0.0), (1, 1.0), (2, 0.5)):
            settle(row, score)
        assert not quota.is_met() and not quota.is_met(), "two at most differ, each counted once"
        dist.barrier()
        if rank == 0:
            settle(3, 0.5)
            assert not quota.is_met(), "equal ones do not count"
        dist.barrier()
        if rank == 1:
            settle(3, 0.25)
            assert quota.is_met()
        dist.barrier()
        assert quota.is_met(), "on all ranks"
        dist.barrier()


def test_there_is_enough_once_so_many_groups_of_all_ranks_are_known_to_differ():
    run_ranks(2, known)


def choose_early(rank: int, world_size: int) -> None:
    """The engines have finished four of six prompts, in turn on two ranks; one token was written in vain."""
    finished = {0: [5, 1], 1: [3, 0]}[rank]
    samples = [sample_of(i, j, [i, j], [-1.0, None]) for i in finished for j in range(N)]
    grades = [Grade([float(10 * one.prompt_index + one.sample_index)], {}) for one in samples]
    prompts = [Prompt(100 + i, [1], "", None) for i in range(SIZE)]
    asked = []

    def sample(prompts: list[Prompt], num_groups: int) -> Responses:
        asked.append(num_groups)
        fresh = list(map(replace, samples))
        return ScoredResponses(prompts, fresh, grades, EngineUsage(written_tokens=len(samples) + rank))

    exchange = Exchange(dist.group.WORLD)
    choose = partial(choose_groups, sample, lambda: prompts, exchange, 3, nullcontext, over_samples=True)
    chosen = choose(filters=FilterGroups())
    assert asked == [3] and [prompt.index for prompt in chosen.prompts] == [100, 101, 103]
    counts = {"over_sampling/unfinished_groups": 2, "over_sampling/dropped_tokens": N + 1}
    assert chosen.metrics == {"over_sampling/surplus_groups": 1} | counts and chosen.num_dropped_tokens == N + 1
    for one in chosen.samples:
        index = [0, 1, 3][one.prompt_index]
        assert one.tokens[0] == index and one.grade.scores == [10 * index + one.sample_index]
    assert len(chosen.samples) == (N if rank == 0 else 2 * N)
    chosen = choose(filters=FilterGroups(enable=True, max_num_gen_batches=1))
    assert [prompt.index for prompt in chosen.prompts] == [100, 101, 103]
    found = {"num_gen_batches": 1, "equal_groups": 0, "equal_groups_kept": 0, "surplus_groups": 1}
    assert chosen.metrics == {f"filter_groups/{name}": count for name, count in found.items()} | counts


def test_of_the_groups_that_are_finished_the_first_are_chosen():
    run_ranks(2, choose_early)
