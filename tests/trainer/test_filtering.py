"""Which groups are chosen, compared with a plain loop over all responses of all ranks."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple
from functools import partial
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.config.algorithm_section import FilterGroups
from megappo.data.prompts import Prompt
from megappo.observe.metrics import Metric
from megappo.rollouts.responses import SampleScoring, Scored
from megappo.rollouts.sampler import Sample, Use, store_counter
from megappo.trainer.filtering import _differ, choose_finished, choose_groups
from megappo.trainer.over_sampling import Enough, Wanted
from megappo.trainer.rollouts import Responses
from megappo.userland.forms import Graded
from megappo.userland.pool import RewardError
from megappo.userland.work import Scoring, Unit

SIZE, NUM_ROUNDS, N = 6, 4, 3
PROMPTS = [Prompt(i, [1], "", None) for i in range(SIZE)]


def scores_of(seed: int) -> list[list[list[float]]]:
    """Of each round, prompt and response; about half of the groups have equal ones."""
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

        def respond(prompts: list[Prompt], wanted: None, scores: list = scores) -> Responses:
            mine = [i for i in range(SIZE) if 1 + i % 2 == rank]
            samples = [
                Sample(i, j, [prompts[i].index, j], [-1.0, None], "stop") for i in reversed(mine) for j in range(N)
            ]
            of_round = scores[prompts[0].index // 100]
            graded = [Graded([of_round[one.prompt_index][one.sample_index]], {}) for one in samples]
            counts = {"errors": Metric.of(1, "sum")} if rank else {}
            return Responses(samples, [], Scored(graded, counts), use=Use(1.0, 2.0, 3, rank, len(samples)))

        rollouts = SimpleNamespace(respond=respond, exchange=exchange)
        order = []
        phase = partial(noted, order)
        settings = FilterGroups(max_num_gen_batches=3)
        chosen = choose_groups(rollouts, draw, settings, SIZE, phase)
        expected, others, rounds = [], [], 0
        while len(expected) < SIZE and rounds < 3:
            for i, group in enumerate(scores[rounds]):
                (expected if len(set(group)) > 1 else others).append((rounds, i))
            rounds += 1
        assert order == ["rollout", "after rollout", "reward", "after reward"] * rounds
        use = chosen.responses.use
        assert astuple(use)[:4] == (rounds, 2.0 * rounds, 3 * rounds, rank * rounds), "of all rounds"
        taken = (expected + others)[:SIZE]
        assert [prompt.index for prompt in chosen.prompts] == [100 * number + i for number, i in taken]
        assert chosen.metrics == {
            "filter_groups/num_gen_batches": rounds,
            "filter_groups/equal_groups": len(others),
            "filter_groups/equal_groups_kept": max(0, SIZE - len(expected)),
            "filter_groups/surplus_groups": max(0, len(expected) - SIZE),
        }
        assert chosen.num_dropped_tokens == N * (SIZE * rounds - SIZE)
        graded, samples = chosen.responses.scoring.graded(), chosen.responses.sampled
        found = [part for of_rank in exchange.share(list(zip(samples, graded, strict=True))) for part in of_rank]
        assert len(found) == N * SIZE
        for sample, one in found:
            number, i = taken[sample.prompt_index]
            assert sample.tokens == [100 * number + i, sample.sample_index]
            assert one.scores == [scores[number][i][sample.sample_index]]
        if rank:
            assert chosen.responses.scoring.counts()["errors"].value == rounds, "of what was dropped, too"


def test_groups_whose_scores_differ_are_chosen_in_order():
    run_ranks(3, choose)


def choose_by_part(rank: int, world_size: int) -> None:
    parts = [{"acc": 0.0}, {"acc": 1.0}, {}]
    samples = [Sample(i // 2, i % 2, [1], [-1.0], "stop") for i in range(4)]

    def chosen(of_samples: list[dict], metric: str) -> list[int]:
        graded = [
            Graded([float(i)], of_sample) if of_sample else Graded([], {}, failed=True)
            for i, of_sample in enumerate(of_samples)
        ]
        respond = lambda prompts, wanted: Responses(samples, [], Scored(graded, {}))  # noqa: E731
        rollouts = SimpleNamespace(respond=respond, exchange=Exchange(dist.group.WORLD))
        prompts = [Prompt(i, [1], "", None) for i in range(2)]
        settings = FilterGroups(metric=metric, max_num_gen_batches=1)
        return [prompt.index for prompt in choose_groups(rollouts, lambda: prompts, settings, 1, nullcontext).prompts]

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
    """Stands where those of a reward function are: tests settle what they find."""

    def put(self, units: Sequence[Unit]) -> None:
        pass

    def check(self) -> None:
        pass


def known(rank: int, world_size: int) -> None:
    """Groups of two, at both ranks, are scored one after the other."""
    scorings = [Scoring(Workers(), names) for names in (["f"], ["f", "g"])]
    store = dist.distributed_c10d._get_default_store()
    for number, scoring in enumerate(scorings):
        samples = SampleScoring(SimpleNamespace(begin=lambda scoring=scoring: scoring), Tokenizer(), PROMPTS)
        wanted = Wanted(3, partial(_differ, ("score", "acc")[number]))
        enough = Enough(wanted, samples, store_counter(store, f"enough {number}"))
        for i in range(2):
            enough.add(samples.add([Sample(i, j, [1], [-1.0], "stop") for j in range(2)]))

        def settle(row: int, score: float, scoring: Scoring = scoring) -> None:
            for function in range(len(scoring._functions)):
                scoring.settle(Unit(scoring, row), function, Graded([score], {"acc": score} if function else {}))

        assert not enough()
        for row, score in ((0, 0.0), (1, 1.0), (2, 0.5)):
            settle(row, score)
        assert not enough() and not enough(), "two at most differ, each counted once"
        dist.barrier()
        if rank == 0:
            settle(3, 0.5)
            assert not enough(), "equal ones do not count"
        dist.barrier()
        if rank == 1:
            settle(3, 0.25)
            assert enough()
        dist.barrier()
        assert enough(), "on all ranks"
        dist.barrier()


def test_there_is_enough_once_so_many_groups_of_all_ranks_are_known_to_differ():
    run_ranks(2, known)


def choose_early(rank: int, world_size: int) -> None:
    """Of six prompts the engines have finished four, behind each other on two ranks; one token was written in vain."""
    finished = {0: [5, 1], 1: [3, 0]}[rank]
    samples = [Sample(i, j, [i, j], [-1.0, None], "stop") for i in finished for j in range(N)]
    scoring = Scored([Graded([float(10 * one.prompt_index + one.sample_index)], {}) for one in samples], {})
    prompts = [Prompt(100 + i, [1], "", None) for i in range(SIZE)]
    asked = []

    def respond(prompts: list[Prompt], wanted: Wanted) -> Responses:
        asked.append(wanted.num_groups)
        return Responses(samples, [], scoring, use=Use(written_tokens=len(samples) + rank))

    rollouts = SimpleNamespace(respond=respond, exchange=Exchange(dist.group.WORLD))
    chosen = choose_finished(rollouts, prompts, 3)
    assert asked == [3] and [prompt.index for prompt in chosen.prompts] == [100, 101, 103]
    counts = {"over_sampling/unfinished_groups": 2, "over_sampling/dropped_tokens": N + 1}
    assert chosen.metrics == {"over_sampling/surplus_groups": 1} | counts and chosen.num_dropped_tokens == N + 1
    graded = chosen.responses.scoring.graded()
    for sample, one in zip(chosen.responses.sampled, graded, strict=True):
        index = [0, 1, 3][sample.prompt_index]
        assert sample.tokens[0] == index and one.scores == [10 * index + sample.sample_index]
    assert len(graded) == (N if rank == 0 else 2 * N)
    settings = FilterGroups(max_num_gen_batches=1)
    chosen = choose_groups(rollouts, lambda: prompts, settings, 3, nullcontext, over_samples=True)
    assert [prompt.index for prompt in chosen.prompts] == [100, 101, 103]
    found = {"num_gen_batches": 1, "equal_groups": 0, "equal_groups_kept": 0, "surplus_groups": 1}
    assert chosen.metrics == {f"filter_groups/{name}": count for name, count in found.items()} | counts


def test_of_the_groups_that_are_finished_the_first_are_chosen():
    run_ranks(2, choose_early)
