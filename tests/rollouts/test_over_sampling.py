"""Over-sampling: the engine aborts the surplus at once, and samples correctly afterwards."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import closing

import pytest
from samplers import Engine, queue_config

from megappo.data.prompts import Prompt
from megappo.engines.client import SamplingParams
from megappo.rollouts.sample_rows import Sample, Segment

N = 2
LONG, SHORT = 110, 4
PROMPTS = [Prompt(number, [2 + number, 3, 4], "", None) for number in range(12)]


class Turns:
    """Plays episodes of short turns, long episodes from prompt `long` on. `cut` lists the cancelled episodes."""

    def __init__(self, long: int) -> None:
        self.cut: list[int] = []
        self.long = long

    async def play(self, prompt_index, sample_index, generate):
        is_long = prompt_index % len(PROMPTS) >= self.long
        segment = Segment(PROMPTS[prompt_index % len(PROMPTS)].tokens)
        ended = False
        try:
            for turn in range(1, 25 if is_long else 2):
                segment.write(await generate(segment.context, SHORT), turn)
                await asyncio.sleep(0.2 if is_long else 0.0)
            ended = True
        finally:
            self.cut += [] if ended else [prompt_index]
        return Sample(prompt_index, sample_index, [segment], "done", {})


def draws() -> Iterator[list[tuple[int, Prompt]]]:
    """The same prompts again and again."""
    return ([(first + i, prompt) for i, prompt in enumerate(PROMPTS)] for first in itertools.count(0, len(PROMPTS)))


def is_idle(client) -> bool:
    client.hang_seconds = 300.0
    client.post("/flush_cache?timeout=0.3", {})  # refused while a request runs; the last batch is put away by then
    return True


def check(groups, oracle) -> None:
    for group in groups:
        [first, *_] = group.samples
        tokens = PROMPTS[group.position % len(PROMPTS)].tokens
        assert len(group.samples) == N
        assert first.log_probs == pytest.approx(oracle(tokens, first.tokens), abs=1e-4)


def test_an_engine_that_has_written_enough_aborts_the_rest_and_samples_on_correctly(client, oracle):
    engine, drawn = Engine(queue_config(3, 12, n=N), client, SamplingParams(LONG)), draws()
    with closing(engine.sampler):
        for step in (1, 2):
            before = engine.sampler.usage.written_tokens
            engine.admit(step, lambda: next(drawn))
            choice = engine.choose(step)
            taken, dropped = engine.take(choice)
            assert is_idle(client)
            first = (step - 1) * len(PROMPTS)
            assert sorted(choice.chosen + choice.left_out) == list(range(first, first + len(PROMPTS)))
            assert (len(taken), engine.queue.prompts) == (3, {})
            assert all(len(sample.tokens) == LONG for group in taken for sample in group.samples)
            written = engine.sampler.usage.written_tokens - before
            trained = 3 * N * LONG
            assert trained < written < LONG * N * len(PROMPTS), "what was left in the middle, too"
            # The last token of an aborted response is not kept.
            assert 0 <= written - trained - sum(group.num_tokens for group in dropped) <= N * len(dropped)
            check(taken, oracle)


def test_surplus_episodes_are_cancelled(client):
    playing = Turns(long=4)
    engine = Engine(queue_config(4, 12, n=N), client, SamplingParams(LONG), playing)
    with closing(engine.sampler):
        engine.admit(1, lambda: next(draws()))
        choice = engine.choose(1)
        engine.take(choice)
        assert is_idle(client)
    assert choice.chosen == [0, 1, 2, 3]
    assert sorted(set(playing.cut)) == list(range(4, 12))


@pytest.mark.parametrize("plays", [False, True], ids=["responses", "episodes"])
def test_what_a_later_step_needs_is_continued_where_it_was_aborted(client, oracle, plays):
    """Two draws are in progress, of which the first has enough groups: nothing of the second is lost."""
    playing = Turns(long=6) if plays else None
    settings = queue_config(3, 12, n=N, max_staleness=1)
    engine, drawn = Engine(settings, client, SamplingParams(LONG), playing), draws()
    with closing(engine.sampler):
        for step in (1, 2, 3):
            engine.admit(step, lambda: next(drawn))
            choice = engine.choose(step)
            assert {position // len(PROMPTS) for position in [*choice.chosen, *choice.left_out]} == {step - 1}
            taken, _ = engine.take(choice)
            check(taken, oracle)
            assert min(engine.queue.prompts) == step * len(PROMPTS), "the next draw stays"


def test_an_engine_that_finishes_by_itself_gets_no_abort(client, monkeypatch, oracle):
    monkeypatch.setattr(client, "abort_all", None)
    engine, drawn = Engine(queue_config(12, n=N), client, SamplingParams(SHORT)), draws()
    with closing(engine.sampler):
        for step in (1, 2):
            engine.admit(step, lambda: next(drawn))
            taken, dropped = engine.take(engine.choose(step))
            assert (len(taken), dropped) == (12, [])
            check(taken, oracle)
