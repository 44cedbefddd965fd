"""Weights that change while an engine writes: which weights wrote each token, by Hugging Face's log-probs."""

import copy
import os
import signal
from collections.abc import Callable, Mapping

import pytest
import torch
from engine_server import response
from hf_oracle import log_probs_of, named_weights
from watched_engine import Watched, writing
from weight_sources import push

from megappo.config.schema import Rollout
from megappo.engines.client import EngineClient, EngineFault, deferring_faults, taking_weights
from megappo.engines.generations import INCOMPLETE, Generation, SamplingParams, WeightVersion, checked
from megappo.engines.process import Engine

PROMPTS = [[5, 6, 7, 3, 2, 9, 30, last] for last in range(24)]
LONG = SamplingParams(100)
"""The checkpoint has 128 positions, and its responses never end by themselves."""
Shapes = Mapping[str, tuple[int, ...]]


def give(client: EngineClient, model: torch.nn.Module, shapes: Shapes, version: WeightVersion) -> None:
    with taking_weights(client, version):
        push(client, named_weights(model), shapes)


@pytest.fixture
def changed_model(hf_model: torch.nn.Module) -> torch.nn.Module:
    """The oracle after an update."""
    changed = copy.deepcopy(hf_model)
    with torch.no_grad():
        for number, (_, tensor) in enumerate(named_weights(changed)):
            tensor.mul_(1.0 + 0.003 * (number + 1))
    return changed


@pytest.fixture
def swapped(
    engine: Engine, hf_model: torch.nn.Module, changed_model: torch.nn.Module, engine_shapes: Shapes, restored: None
) -> Callable[..., tuple[Watched, list[Generation]]]:
    """Changes the weights from version 3 to 4 while the engine writes; returns its client and the responses."""

    def swap(*, keeps_cache: bool) -> tuple[Watched, list[Generation]]:
        client = Watched(engine)
        give(client, hf_model, engine_shapes, WeightVersion(3, keeps_cache))
        with writing(client, PROMPTS, LONG) as responses:
            give(client, changed_model, engine_shapes, WeightVersion(4, keeps_cache))
            return client, responses.result()

    return swap


def check_spans(generations: list[Generation]) -> None:
    """Check that all responses are whole, and that version 3 began and version 4 finished most of them."""
    for generation in generations:
        assert len(generation.tokens) == 100 and generation.finish_reason == "length"
        assert list(generation.versions) == sorted(generation.versions) and {*generation.versions} <= {3, 4}
        assert generation.versions[0] == 3
    assert sum(generation.versions[-1] == 4 for generation in generations) > len(PROMPTS) / 2


def test_paused_responses_resume_with_the_new_weights_from_what_they_have_computed_again(
    swapped, hf_model, changed_model
):
    client, generations = swapped(keeps_cache=False)
    check_spans(generations)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        old, new = (log_probs_of(model, prompt, generation.tokens) for model in (hf_model, changed_model))
        expected = [o if version == 3 else n for o, n, version in zip(old, new, generation.versions, strict=True)]
        assert generation.log_probs == pytest.approx(expected, abs=1e-4)
    check_new_prompts(client, changed_model)


def test_paused_responses_resume_with_the_new_weights_over_the_old_ones_cache(swapped, hf_model, changed_model):
    client, generations = swapped(keeps_cache=True)
    check_spans(generations)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        num_old = list(generation.versions).count(3)
        expected = log_probs_over_old_cache(hf_model, changed_model, prompt, generation.tokens, num_old)
        assert generation.log_probs == pytest.approx(expected, abs=1e-4)
    check_new_prompts(client, changed_model)
    client.version = WeightVersion(3, keeps_cache=True)  # as a request that was on its way when the weights changed
    for prompt, generation in zip(PROMPTS, client.generate(PROMPTS, SamplingParams(4)), strict=True):
        assert generation.num_cached > 0 and list(generation.versions) == [3, 4, 4, 4]
        new = log_probs_of(changed_model, prompt, generation.tokens)
        assert generation.log_probs != pytest.approx(new, abs=1e-3), "its prompt was computed by the old weights"


def log_probs_over_old_cache(
    old: torch.nn.Module, new: torch.nn.Module, prompt: list[int], response: list[int], num_old: int
) -> list[float]:
    """Return the log-probs of a response that one model continues with another's keys and values, which has written
    `num_old` tokens, and has processed all of them but the last."""
    tokens, num_processed = torch.tensor([prompt + response]), len(prompt) + num_old - 1
    with torch.no_grad():
        first = old(tokens[:, :num_processed], use_cache=True)
        second = new(tokens[:, num_processed:], past_key_values=first.past_key_values)
    log_probs = torch.cat([first.logits, second.logits], dim=1)[0, len(prompt) - 1 : -1].log_softmax(-1)
    return log_probs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def check_new_prompts(client: EngineClient, model: torch.nn.Module) -> None:
    """Check that prompts that the old weights have cached are computed by the new ones."""
    for prompt, generation in zip(PROMPTS, client.generate(PROMPTS, SamplingParams(4)), strict=True):
        assert list(generation.versions) == [4] * 4
        assert generation.log_probs == pytest.approx(log_probs_of(model, prompt, generation.tokens), abs=1e-4)


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_an_engine_is_not_left_paused_by_a_failed_sync_and_nothing_that_it_writes_then_is_used(
    engine, hf_model, engine_shapes, restored, keeps_cache
):
    client = Watched(engine)
    give(client, hf_model, engine_shapes, WeightVersion(3, keeps_cache))
    with writing(client, PROMPTS, LONG, 4) as responses, pytest.raises(EngineFault, match="incomplete"):
        with pytest.raises(FloatingPointError), taking_weights(client, WeightVersion(4, keeps_cache)):
            raise FloatingPointError("the actor's weights are corrupt")
        responses.result()
    with pytest.raises(EngineFault, match="incomplete"):
        client.generate(PROMPTS[:1], SamplingParams(1))


@pytest.mark.slow
def test_an_engine_that_is_killed_while_it_is_paused_is_restarted(checkpoint, hf_model, engine_shapes, tmp_path):
    rollout = Rollout(max_staleness=1, max_total_tokens=4096, start_timeout_seconds=180)
    engine = Engine(checkpoint, rollout, "fp32", index=0, gpu_ids=[], log_path=tmp_path / "engine.log", seed=0)
    engine.start()
    try:
        engine.wait_ready()
        client = Watched(engine)
        give(client, hf_model, engine_shapes, WeightVersion(3))
        with writing(client, PROMPTS, LONG) as responses, deferring_faults(client):
            with taking_weights(client, WeightVersion(4)):
                os.killpg(engine._process.pid, signal.SIGKILL)
            with pytest.raises(EngineFault):
                responses.result()
        assert client.take_fault() is not None
        engine.restart()
        give(client, hf_model, engine_shapes, WeightVersion(4))
        [generation] = client.generate(PROMPTS[:1], SamplingParams(4))
        assert list(generation.versions) == [4] * 4
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([("3", 0, 2)], "all 3 tokens"),
        ([("3", 0, 1), ("4", 2, 3)], "without gaps"),
        ([("3", 0, 2), ("4", 1, 3)], "without gaps"),
        ([("3", 0, 2), (INCOMPLETE, 2, 3)], "no response.*incomplete"),
        ([("default", 0, 3)], "no response.*default"),
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_the_engines_fault(spans, message):
    reply = response([5, 6, 7], [-1.0, -2.0, -3.0])
    checked(reply)
    reply["meta_info"]["weight_versions"] = [
        dict(zip(("version", "start", "end"), span, strict=True)) for span in spans
    ]
    with pytest.raises(EngineFault, match=message):
        checked(reply, version=WeightVersion(3))
