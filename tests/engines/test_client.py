"""The engine's answers against Hugging Face's model of the same weights."""

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
import torch
from engine_log_probs import engine_log_probs
from engine_server import EngineServer

from megappo.engines.client import (
    WEIGHTS,
    WORKING_MEMORY,
    EngineClient,
    EngineError,
    EngineFault,
    SamplingParams,
    deferring_faults,
)

PROMPTS = [[5, 6, 7], [11], [9, 8, 7, 6, 5, 4, 3, 2], [40, 41, 42, 43, 40]]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_hugging_face(client, oracle, temperature):
    generations = client.generate(PROMPTS, SamplingParams(12, temperature=temperature))
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert len(generation.tokens) == 12 and generation.finish_reason == "length"
        assert generation.log_probs == pytest.approx(oracle(prompt, generation.tokens, temperature), abs=1e-4)


def test_log_probs_are_of_the_whole_vocabulary_under_top_k(client, oracle):
    [generation] = client.generate([PROMPTS[0]], SamplingParams(12, top_k=3))
    assert generation.log_probs == pytest.approx(oracle(PROMPTS[0], generation.tokens), abs=1e-4)


def test_greedy_tokens_equal_hugging_face(client, hf_model):
    generations = client.generate(PROMPTS, SamplingParams(10, temperature=0.0))
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        expected = hf_model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :]
        assert generation.tokens == expected.tolist()


def test_samples_follow_the_models_distribution(client, hf_model):
    count = 1024
    generations = client.generate([PROMPTS[0]] * count, SamplingParams(1))
    found = (
        torch.bincount(torch.tensor([g.tokens[0] for g in generations]), minlength=hf_model.config.vocab_size) / count
    )
    expected = hf_model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    # five standard deviations of a frequency
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt() + 1 / count).all()


def test_a_response_ends_with_its_stop_token(client, oracle):
    [free] = client.generate([PROMPTS[0]], SamplingParams(10, temperature=0.0))
    stop = free.tokens[4]
    [stopped] = client.generate([PROMPTS[0]], SamplingParams(10, temperature=0.0, stop_token_ids=(stop,)))
    end = free.tokens.index(stop) + 1
    assert stopped.tokens == free.tokens[:end] and stopped.finish_reason == "stop"
    assert stopped.log_probs == pytest.approx(oracle(PROMPTS[0], stopped.tokens), abs=1e-4)


def test_score_equals_hugging_face(client, oracle):
    for sequence, log_probs in zip(PROMPTS, engine_log_probs(client, PROMPTS), strict=True):
        expected = oracle(sequence[:1], sequence[1:]) if len(sequence) > 1 else []
        assert log_probs == pytest.approx(expected, abs=1e-4)


def test_it_generates_the_same_after_sleep_and_flush(client):
    params = SamplingParams(8, temperature=0.0)
    before = client.generate(PROMPTS, params)
    for call in (client.sleep, client.wake, client.flush_cache):
        call()
    assert [g.tokens for g in client.generate(PROMPTS, params)] == [g.tokens for g in before]


def flush_at_once(client: EngineClient) -> None:
    """Flush the engine's cache, which it refuses while it writes."""
    client.post("/flush_cache?timeout=0", {})


def wait_until_it_writes(client: EngineClient, writing: Future) -> None:
    with pytest.raises(EngineError, match="refused"):
        while not writing.done():
            flush_at_once(client)
            time.sleep(0.01)


def test_it_sleeps_once_what_it_writes_is_written(client):
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(client.generate, PROMPTS * 16, SamplingParams(100))
        wait_until_it_writes(client, writing)
        client.sleep()
        flush_at_once(client)  # the reply to the request may still be on its way
        client.wake(WEIGHTS)
        client.wake(WORKING_MEMORY)
        assert [len(generation.tokens) for generation in writing.result()] == [100] * len(PROMPTS) * 16
    client.generate(PROMPTS, SamplingParams(1))


def test_an_engine_that_stays_busy_refuses_to_sleep(client, monkeypatch):
    monkeypatch.setattr("megappo.engines.client.IDLE_SECONDS", 0.1)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(client.generate, PROMPTS * 16, SamplingParams(100))
        wait_until_it_writes(client, writing)
        with pytest.raises(EngineError, match="flush_cache.* refused .*waiting for idle state"):
            client.sleep()
        writing.result()


def test_the_context_holds_two_tokens_less_and_prompts_seven_less(client):
    """The facts behind config.checks.engine_context; the checkpoint has 128 positions."""
    [whole, cut] = [client.generate([[5] * 100], SamplingParams(number))[0] for number in (26, 27)]
    assert (len(whole.tokens), len(cut.tokens)) == (26, 26)
    assert len(client.generate([[5] * 121], SamplingParams(1))[0].tokens) == 1
    with pytest.raises(EngineError, match="HTTP 400|abort"):
        client.generate([[5] * 122], SamplingParams(1))


def test_refusals_hold_the_engines_reply(client):
    with pytest.raises(EngineError, match=r"HTTP 400.*longer than the model's context length"):
        client.generate([[5] * 500], SamplingParams(1))
    with pytest.raises(EngineError, match="must run between"):
        client.post(
            "/update_weights_from_tensor",
            {"serialized_named_tensors": ["AAAA"], "load_format": "flattened_bucket"},
        )


def test_only_the_key_opens_the_engine(engine):
    with pytest.raises(EngineError, match="HTTP 401"):
        EngineClient(engine.url, "a wrong key", 10.0).generate([[5]], SamplingParams(1))
    assert httpx.get(f"{engine.url}/server_info").status_code == 401


def test_nobody_there(client):
    with pytest.raises(EngineError, match="does not answer"):
        EngineClient("http://127.0.0.1:9", "key", 10.0).flush_cache()


def test_after_a_deferred_fault_no_request_is_sent():
    def ended() -> None:
        raise EngineFault("it ended, and another listens in its place")

    with EngineServer() as server:
        client = EngineClient(f"http://127.0.0.1:{server.server_port}", "key", 20.0, check_alive=ended)
        with pytest.raises(EngineFault, match="another listens"):
            client.check_health()
        with deferring_faults(client):
            client.check_health()
            assert client.has_failed and client.post("/generate", {"input_ids": [[1]]}) is None
        assert next(server.requests) == 0, "no request was sent"
        assert "another listens" in str(client.take_fault()) and client.take_fault() is None
        assert len(client.post("/generate", {"input_ids": [[1]]})) == 1


def test_a_group_that_another_member_has_broken_is_a_fault_and_a_wrong_request_is_not():
    with EngineServer("in vain") as server:
        with pytest.raises(EngineFault, match="refused .HTTP 400.: .*why"):
            server.client().post("/update_weights_from_distributed", {})
        with pytest.raises(EngineError, match="refused .HTTP 400.: .*why") as refused:
            server.client().post("/update_weights_from_disk", {})
        assert not isinstance(refused.value, EngineFault)


@pytest.mark.parametrize("failure", ["hang", "deaf"])
def test_an_engine_that_does_not_answer_has_failed_long_before_a_rollouts_time_is_over(failure):
    requests = (EngineClient.sleep, EngineClient.wake, EngineClient.flush_cache, EngineClient.begin_weight_update)
    probe = (lambda client: client.generate([[1]], SamplingParams(1)),)
    health = (EngineClient.check_health,) if failure == "deaf" else ()
    with EngineServer(failure) as server:
        for request in (*requests, *probe, *health):
            with pytest.raises(EngineFault, match="has not answered for 0.6 s: .* raise watchdog_timeout in rollout"):
                request(server.client())


def test_connections_are_used_again_by_one_request_at_a_time(client) -> None:
    async def send() -> None:
        async with client.open_async() as connections:
            async with connections.free() as first, connections.free() as second:
                for http in (first, second):
                    assert (await http.get("/health")).status_code == 200
            async with connections.free() as third:
                assert (await third.get("/health")).status_code == 200
        assert first is not second and third in (first, second)
        assert first.is_closed and second.is_closed

    asyncio.run(send())
