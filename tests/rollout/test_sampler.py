"""Prompts spread over engines: every sample once, more to whoever is faster."""

import asyncio
import threading
from collections import Counter

import pytest
import torch.distributed as dist

from megappo.rollout.client import EngineClient, EngineError, SamplingParams
from megappo.rollout.sampler import _chunking, sample, store_counter

PROMPTS = [(100 + number, [2 + number, 3, 4]) for number in range(40)]
PARAMS = SamplingParams(3)


class SlowClient(EngineClient):
    """A client whose engine takes half a second longer."""

    async def generate_async(self, *args):
        await asyncio.sleep(0.5)
        return await super().generate_async(*args)


def every_sample_once(samples, n):
    return Counter((s.prompt_index, s.sample_index) for s in samples) == Counter(
        (prompt_index, order) for prompt_index, _ in PROMPTS for order in range(n)
    )


def test_each_prompt_gets_n_samples_with_the_log_probs_of_its_own_tokens(client, oracle):
    finished = []
    samples = sample(
        PROMPTS,
        3,
        PARAMS,
        client,
        store_counter(dist.HashStore(), "step 1"),
        num_engines=1,
        max_running_requests=16,
        on_prompts=lambda count: finished.extend([1] * count),
    )
    assert every_sample_once(samples, 3)
    assert len(finished) == len(PROMPTS)
    tokens_of = dict(PROMPTS)
    for one in samples[::10]:
        assert one.log_probs == pytest.approx(oracle(tokens_of[one.prompt_index], one.tokens), abs=1e-4)


def test_ranks_share_the_prompts_and_the_fast_one_takes_more(engine, client):
    store = dist.HashStore()
    slow = SlowClient(engine.url, engine._api_key, 60.0)
    results = {}

    def rank(name, own_client):
        results[name] = sample(
            PROMPTS, 1, PARAMS, own_client, store_counter(store, "step 1"), num_engines=2, max_running_requests=8
        )

    threads = [threading.Thread(target=rank, args=args) for args in (("fast", client), ("slow", slow))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert every_sample_once(results["fast"] + results["slow"], 1)
    assert len(results["fast"]) > len(results["slow"]) > 0


def test_a_failing_engine_ends_the_sampling_with_its_own_error():
    dead, counter = EngineClient("http://127.0.0.1:9", "key", 10.0), store_counter(dist.HashStore(), "step 1")
    with pytest.raises(EngineError, match="does not answer"):
        sample(PROMPTS, 1, PARAMS, dead, counter, num_engines=2, max_running_requests=8)


@pytest.mark.parametrize("num_prompts", [1, 7, 256, 1000])
@pytest.mark.parametrize("n", [1, 8, 300])
@pytest.mark.parametrize("engines", [1, 3])
def test_in_flight_sequences_are_bounded(num_prompts, n, engines):
    chunk, requests = _chunking(num_prompts, n, engines, 256)
    assert chunk >= 1 and 1 <= requests <= 8
    in_flight = chunk * requests
    assert in_flight < max(256 // n, 1) + chunk  # at most a request over what the engine decodes at once
    assert in_flight < num_prompts / engines + chunk + 1  # nobody takes everything
