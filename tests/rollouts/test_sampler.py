"""Prompts spread over engines: every sample once, more to whoever is faster."""

import asyncio
import contextlib
import itertools
import re
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from engine_server import EngineServer
from sessions import sample

from megappo.config.schema import Rollout
from megappo.engines.client import EngineClient, EngineError, EngineFault, SamplingParams
from megappo.engines.process import Engine
from megappo.rollouts.rollouts import Rollouts
from megappo.rollouts.sample_rows import Sample, Segment
from megappo.rollouts.sampler import EngineUsage, Request, RolloutSession, store_counter

PROMPTS = [(100 + number, [2 + number, 3, 4]) for number in range(40)]
PARAMS = SamplingParams(3)


class SlowClient(EngineClient):
    """A client whose engine takes half a second longer."""

    async def generate_async(self, *args):
        await asyncio.sleep(0.5)
        async with contextlib.aclosing(super().generate_async(*args)) as responses:
            async for one in responses:
                yield one


def every_sample_once(samples, n):
    return Counter((s.prompt_index, s.sample_index) for s in samples) == Counter(
        (prompt_index, order) for prompt_index, _ in PROMPTS for order in range(n)
    )


def test_each_prompt_gets_n_samples_with_the_log_probs_of_its_own_tokens(client, oracle):
    groups = []
    take = store_counter(dist.HashStore(), "step 1")
    settings = {"num_engines": 1, "max_running_requests": 16, "on_group": groups.append}
    samples = sample(PROMPTS, 3, PARAMS, client, take, **settings).samples
    assert every_sample_once(samples, 3)
    assert sorted(group[0].prompt_index for group in groups) == [index for index, _ in PROMPTS]
    tokens_of = dict(PROMPTS)
    for one in samples[::10]:
        assert one.log_probs == pytest.approx(oracle(tokens_of[one.prompt_index], one.tokens), abs=1e-4)


def test_ranks_share_the_prompts_and_the_fast_one_takes_more(engine, client):
    store = dist.HashStore()
    slow = SlowClient(engine.url, engine._api_key, 60.0)
    results = {}

    def rank(name, own_client):
        take = store_counter(store, "step 1")
        results[name] = sample(PROMPTS, 1, PARAMS, own_client, take, num_engines=2, max_running_requests=8).samples

    threads = [threading.Thread(target=rank, args=args) for args in (("fast", client), ("slow", slow))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert every_sample_once(results["fast"] + results["slow"], 1)
    assert len(results["fast"]) > len(results["slow"]) > 0


FAULTS = {
    "no list": "reply is no response .KeyError.'meta_info'",
    "too few": "expected [0-9]+ responses from the engine, got [0-9]+",
    "cut": "expected all 2 tokens of a response at once, got 1",
    **dict.fromkeys(("twice", "unasked"), "reply is no response .KeyError"),
    **dict.fromkeys(("null", "other error"), "reply is no response .TypeError"),
    "late error": "refused .HTTP 500.: .*why",
    "break": "does not answer .*incomplete",
    "other tokens": "tokens .7, 8. and the tokens of its log-probs",
    "no numbers": "no number",
    "aborted": "expected a response to end by stop or length, got .*abort",
    "no log-probs": "reply is no response .KeyError.'output_token_logprobs'",
    "no JSON": "did not answer with JSON .*<html>",
    "crash": "does not answer",
    "error": "refused .HTTP 500.: .*why",
    **dict.fromkeys(("hang", "deaf"), "has not answered for 0.6 s: .* raise watchdog_timeout in rollout.server_args"),
}
"""Failure of an engine -> the message of its fault."""


def fail_after(server, num_groups):
    """An `on_group` that has every request but the first wait for so many groups: it would fail while these come."""
    requests, groups, arrived = itertools.count(), itertools.count(1), threading.Event()
    server.before = lambda: next(requests) == 0 or arrived.wait(10)
    return lambda samples: next(groups) == num_groups and arrived.set()


@pytest.mark.parametrize("failure", FAULTS)
def test_responses_before_an_engines_fault_are_kept(failure, monkeypatch):
    monkeypatch.setattr("megappo.engines.client.WATCH_SECONDS", 0.1)
    monkeypatch.setattr("megappo.engines.client.ENDING_SECONDS", 0.2)
    store = dist.HashStore()
    with EngineServer(failure, num_well=1) as server:
        first, second = store_counter(store, "first"), store_counter(store, "second")
        few = {"num_engines": 1, "max_running_requests": 48}
        on_group = fail_after(server, num_groups=16)
        sampled = sample(PROMPTS, 3, PARAMS, server.client(), first, on_group=on_group, **few)
        answered = Counter(one.prompt_index for one in sampled.samples)
        assert set(answered.values()) == {3} and 16 <= len(answered) < len(PROMPTS), "at least the first request's"
        assert isinstance(sampled.fault, EngineFault) and re.search(FAULTS[failure], str(sampled.fault))
        server.failure = ""
        left = [prompt for prompt in PROMPTS if prompt[0] not in answered]
        rest = sample(left, 3, PARAMS, server.client(), second, **few)
    assert rest.fault is None
    assert every_sample_once(sampled.samples + rest.samples, 3)


def test_an_engine_that_has_ended_is_reported_though_another_process_listens_in_its_place(monkeypatch):
    monkeypatch.setattr("megappo.engines.client.WATCH_SECONDS", 0.1)

    def has_ended():
        raise EngineFault("the SGLang engine ended (exit code 9)")

    with EngineServer("deaf") as server:
        client = EngineClient(f"http://127.0.0.1:{server.server_port}", "key", 20.0, has_ended, hang_seconds=5.0)
        take = store_counter(dist.HashStore(), "step 1")
        sampled = sample(PROMPTS, 1, PARAMS, client, take, num_engines=1, max_running_requests=8)
    assert str(sampled.fault) == "the SGLang engine ended (exit code 9)"


def test_an_engine_that_is_being_restarted_is_a_fault(tmp_path):
    """The session of a run that samples ahead meets it while the main thread restarts the engine."""
    engine = Engine("model", Rollout(), "fp32", index=0, gpu_ids=[], log_path=tmp_path / "engine.log", seed=0)
    with EngineServer("crash") as server:
        client = EngineClient(f"http://127.0.0.1:{server.server_port}", "key", 20.0, engine.check_alive)
        take = store_counter(dist.HashStore(), "step 1")
        sampled = sample(PROMPTS, 1, PARAMS, client, take, num_engines=1, max_running_requests=8)
    assert isinstance(sampled.fault, EngineFault)


REFUSALS = {
    **dict.fromkeys(("refusal", "late refusal"), "refused .HTTP 400.: .*why"),
    "refused": "expected a response to end by stop or length, got .*400",
}


@pytest.mark.parametrize("failure", REFUSALS)
def test_what_an_engine_refuses_is_not_asked_again(failure):
    with EngineServer(failure) as server, pytest.raises(EngineError, match=REFUSALS[failure]) as raised:
        take = store_counter(dist.HashStore(), "step 1")
        sample(PROMPTS, 1, PARAMS, server.client(), take, num_engines=1, max_running_requests=8)
    assert not isinstance(raised.value, EngineFault)


@pytest.mark.parametrize(
    "num_prompts, n, num_engines, first",
    [
        (40, 1, 1, 8),
        (40, 2, 1, 8),
        (40, 3, 1, 6),
        (40, 9, 1, 9),
        (6, 1, 2, 3),
        (7, 1, 2, 3),
        (1, 1, 3, 1),
        (8, 4, 4, 8),
    ],
)
def test_an_engine_has_as_many_sequences_as_it_decodes_at_once_and_not_more_than_its_share(
    num_prompts, n, num_engines, first
):
    counts, before, at_once = [], [], []

    class Counting(EngineClient):
        async def generate_async(self, http, prompts, params, images=()):
            before.append(sum(counts))
            counts.append(len(prompts))
            at_once.append(sum(counts))
            async with contextlib.aclosing(super().generate_async(http, prompts, params)) as responses:
                async for one in responses:
                    await asyncio.sleep(0.004)
                    counts.append(-1)
                    yield one

    with EngineServer() as server:
        client = Counting(f"http://127.0.0.1:{server.server_port}", "key", 20.0)
        take = store_counter(dist.HashStore(), "step 1")
        sampling = {"num_engines": num_engines, "max_running_requests": 8}
        found = sample(PROMPTS[:num_prompts], n, PARAMS, client, take, **sampling)
    assert len(found.samples) == n * num_prompts
    assert at_once[0] == first and max(at_once) <= max(8, n)
    assert any(before) or num_prompts < 40 or first == n, "refilled while others go on"


def test_images_are_read_once_for_each_prompt_and_beside_the_event_loop():
    read, requests = Counter(), []

    class Images:
        def sent(self, prompt):
            read[prompt, threading.current_thread() is threading.main_thread()] += 1
            return "sent"

    class Listing(EngineClient):
        async def generate_async(self, http, prompts, params, images=()):
            requests.append(len({tuple(prompt) for prompt in prompts}))
            assert list(images) == ["sent"] * len(prompts)
            async with contextlib.aclosing(super().generate_async(http, prompts, params)) as responses:
                async for one in responses:
                    yield one

    images = Rollouts.sent_images(SimpleNamespace(images=Images()), dict.fromkeys(dict(PROMPTS), "p") | {100: "first"})
    with EngineServer() as server:
        client = Listing(f"http://127.0.0.1:{server.server_port}", "key", 20.0)
        take = store_counter(dist.HashStore(), "step 1")
        found = sample(PROMPTS, 4, PARAMS, client, take, num_engines=1, max_running_requests=32, images=images)
    assert every_sample_once(found.samples, 4)
    assert read == {("first", False): 1, ("p", False): 39} and set(requests) == {1}


class Playing:
    """Plays episodes of several turns, whose environments answer at the same moments."""

    def __init__(self):
        self.num_open = self.most = 0

    async def play(self, prompt_index, sample_index, generate):
        self.num_open += 1
        self.most = max(self.most, self.num_open)
        segment = Segment([prompt_index])
        for turn in range(1, 6):
            await asyncio.sleep(0.05 - time.monotonic() % 0.05)
            segment.write(await generate(segment.context, 3), turn)
        self.num_open -= 1
        return Sample(prompt_index, sample_index, [segment], "done", {})


def test_others_have_the_place_of_an_episode_that_waits_for_its_environment():
    """However many come back at once: each is played once, and the engine writes no more than it has places for."""
    at_once, most = 0, 0

    class Counting(EngineClient):
        async def generate_async(self, http, prompts, params, images=()):
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            async with contextlib.aclosing(super().generate_async(http, prompts, params)) as responses:
                async for one in responses:
                    yield one
            at_once -= 1

    with EngineServer() as server:
        client = Counting(f"http://127.0.0.1:{server.server_port}", "key", 20.0)
        take, playing = store_counter(dist.HashStore(), "step 1"), Playing()
        sampling = {"num_engines": 1, "max_running_requests": 4, "runner": playing}
        found = sample(PROMPTS, 2, PARAMS, client, take, **sampling)
    assert every_sample_once(found.samples, 2) and found.fault is None
    assert all(one.num_policy_tokens == 10 and one.num_turns == 5 for one in found.samples)
    assert most == 4 and playing.most == 16


def test_no_engine_begins_more_episodes_than_its_even_share():
    """One that comes later finds as many."""
    with EngineServer() as server:
        store, of_engines = dist.HashStore(), [Playing(), Playing()]
        threads = []
        for playing in of_engines:
            take = store_counter(store, "step 1")
            sampling = {"num_engines": 2, "max_running_requests": 64, "runner": playing}
            arguments = (PROMPTS, 2, PARAMS, server.client(), take)
            threads.append(threading.Thread(target=sample, args=arguments, kwargs=sampling))
            threads[-1].start()
            time.sleep(0.01)
        for thread in threads:
            thread.join()
    assert all(0 < playing.most <= len(PROMPTS) for playing in of_engines)


class Continuing:
    """A source that requests what has been aborted again."""

    is_held = False

    def __init__(self, requests):
        self.waiting, self.put_back_ones = list(requests), []
        self.num_missing, self.is_aborting = len(self.waiting), False

    async def take(self, most):
        while self.is_aborting or (self.num_missing and not self.waiting):
            await asyncio.sleep(0.01)
        taken, self.waiting = self.waiting[:most], self.waiting[most:]
        return taken

    def put_back(self, request):
        self.put_back_ones.append(request)
        self.waiting.append(request)


def test_aborted_responses_continue_from_the_tokens_that_they_have(client, oracle):
    """The checkpoint's responses never end by themselves."""
    params, samples = SamplingParams(100), []
    source = Continuing(Request(number, 0, [5, 6, 7, 3, 2, 9, 30, number]) for number in range(16))

    def add(sample):
        samples.append(sample)
        source.num_missing -= 1

    settings = {"max_running_requests": 16, "usage": EngineUsage(), "on_sample": add}
    session = RolloutSession(source, 1, params, client, **settings)

    async def abort_twice():
        running = asyncio.create_task(session.run_async())
        for seconds in (0.2, 0.02):
            while session.is_idle:
                await asyncio.sleep(0.01)
            await asyncio.sleep(seconds)
            num_before = len(source.put_back_ones)
            source.is_aborting = True
            await session.abort()
            source.is_aborting = False
            assert len(source.put_back_ones) > num_before
        assert await running is None

    asyncio.run(abort_twice())
    assert max(len(request.written.tokens) for request in source.put_back_ones) > 1
    assert sorted(one.prompt_index for one in samples) == list(range(16))
    for one in samples:
        [segment] = one.segments
        assert one.ending == "length" and len(one.tokens) == 100
        assert one.log_probs == pytest.approx(oracle(segment.prompt, one.tokens), abs=1e-4)
