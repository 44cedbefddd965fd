"""Over-sampling: the engine aborts the surplus at once, is idle then, and samples correctly afterwards."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import pytest
import torch.distributed as dist
from sessions import Sampled, sample

from megappo.engines.client import SamplingParams
from megappo.rollouts.group_selection import GroupQuota
from megappo.rollouts.sample_rows import Sample, Segment
from megappo.rollouts.sampler import store_counter
from megappo.userland.grades import Grade

N = 2
LONG, SHORT = 110, 4
PROMPTS = [(100 + number, [2 + number, 3, 4]) for number in range(12)]


class Turns:
    """Plays episodes of short turns, long episodes from prompt `long` on. `cut` lists the cancelled episodes."""

    def __init__(self, long: int) -> None:
        self.cut: list[int] = []
        self.long = long

    async def play(self, prompt_index, sample_index, generate):
        segment = Segment([prompt_index - 98], "")
        ended = False
        try:
            for turn in range(1, 2 if prompt_index < self.long else 25):
                segment.write(await generate(segment.context, SHORT), "", turn)
                await asyncio.sleep(0.2 if prompt_index >= self.long else 0.0)
            ended = True
        finally:
            self.cut += [] if ended else [prompt_index]
        return Sample(prompt_index, sample_index, [segment], "done", {})


def sampled_until(client, params, num_groups, **options) -> Sampled:
    groups: list = []
    take = store_counter(dist.HashStore(), "step 1")
    settings = {"num_engines": 1, "max_running_requests": 8, "on_group": groups.append} | options
    return sample(PROMPTS, N, params, client, take, early_stop=lambda: len(groups) >= num_groups, **settings)


def idle(client) -> bool:
    client.hang_seconds = 300.0
    client.post("/flush_cache?timeout=0.3", {})  # refused while a request runs; the last batch is put away by then
    return True


def test_an_engine_that_has_written_enough_aborts_the_rest_and_samples_on_correctly(client, oracle):
    found = sampled_until(client, SamplingParams(LONG), 3)
    assert idle(client) and found.fault is None
    whole = {one.prompt_index for one in found.samples}
    assert 3 <= len(whole) < len(PROMPTS) and len(found.samples) == N * len(whole)
    assert all(one.ending == "length" and len(one.tokens) == LONG for one in found.samples)
    of_samples = LONG * len(found.samples)
    assert of_samples <= found.usage.written_tokens < LONG * N * len(PROMPTS), "what was left in the middle, too"
    take = store_counter(dist.HashStore(), "step 2")
    again = sample(PROMPTS, N, SamplingParams(SHORT), client, take, num_engines=1, max_running_requests=8)
    assert len(again.samples) == N * len(PROMPTS)
    assert again.usage.written_tokens == SHORT * N * len(PROMPTS)
    tokens_of = dict(PROMPTS)
    for one in (found.samples[0], again.samples[-1]):
        assert one.log_probs == pytest.approx(oracle(tokens_of[one.prompt_index], one.tokens), abs=1e-4)


def test_surplus_episodes_are_cancelled(client):
    playing = Turns(long=104)
    found = sampled_until(client, SamplingParams(LONG), 4, runner=playing, max_running_requests=24)
    assert idle(client) and found.fault is None
    assert {one.prompt_index for one in found.samples} == {100, 101, 102, 103}
    assert sorted(set(playing.cut)) == list(range(104, 112)) and len(playing.cut) == 16
    assert found.usage.written_tokens > sum(one.num_policy_tokens for one in found.samples)


def test_an_engine_that_finishes_by_itself_gets_no_abort(client, monkeypatch):
    monkeypatch.setattr(client, "abort_all", None)
    found = sample(
        PROMPTS,
        N,
        SamplingParams(SHORT),
        client,
        store_counter(dist.HashStore(), "step 1"),
        num_engines=1,
        max_running_requests=8,
        early_stop=lambda: False,
    )
    assert len(found.samples) == N * len(PROMPTS)


def test_an_engine_that_is_done_first_counts_its_groups_whose_scores_come_later(client):
    """Two of them: the first takes the four short episodes, the other two that are short and two that are long."""
    store, playing = dist.HashStore(), Turns(long=106)

    def engine(_: int) -> list[int]:
        quota = GroupQuota(6, "score", store_counter(store, "quota"))

        def on_group(group) -> None:
            """The scores are known a second later."""
            since = time.monotonic()
            differing = [replace(group[0], grade=Grade([score], {})) for score in (1.0, 2.0)]
            quota.add(differing, lambda: time.monotonic() > since + 1.0)

        take = store_counter(store, "prompts")
        settings = {"num_engines": 2, "max_running_requests": 4, "on_group": on_group, "runner": playing}
        found = sample(PROMPTS[:8], 1, SamplingParams(LONG), client, take, early_stop=quota.is_met, **settings)
        quota.wait_counted(lambda: False)
        return [one.prompt_index for one in found.samples]

    with ThreadPoolExecutor(2) as threads:
        found = sorted(chain.from_iterable(threads.map(engine, range(2))))
    assert found == [100, 101, 102, 103, 104, 105] and sorted(playing.cut) == [106, 107]
