"""Requests with images: what is sent, what is refused, and a real engine against transformers."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_vision
from tiny_vision import IMAGE, PLACEHOLDER, VIDEO, Oracle, noise

from megappo.config.schema import Rollout
from megappo.engines.client import EngineClient, EngineError
from megappo.engines.generations import SamplingParams, SentImages, check_prompt_length, generate_body
from megappo.engines.process import Engine

A, B = noise(84, 112, 1), noise(60, 150, 2, "JPEG")


def url(image: bytes) -> str:
    return "data:image;base64," + base64.b64encode(image).decode()


def test_each_image_becomes_one_token():
    images = [SentImages(7, [1, 9, 2, 9, 3], ["a", "b"]), SentImages(2, [7, 8], [])]
    body = generate_body([[1, 9, 9, 9, 2, 9, 3, 4, 5], [7, 8]], SamplingParams(4), images=images)
    assert body["input_ids"] == [[1, 9, 2, 9, 3, 4, 5], [7, 8]] and body["image_data"] == [["a", "b"], []]
    assert "image_data" not in generate_body([[1]], SamplingParams(4))


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Engine]]:
    home = tmp_path_factory.mktemp(request.param)
    folder = tiny_vision.vision_folder(home / "model", request.param)
    rollout = Rollout(max_total_tokens=4096, max_running_requests=8, start_timeout_seconds=300)
    engine = Engine(folder, rollout, "fp32", index=0, gpu_ids=[], log_path=home / "engine.log", seed=0)
    engine.start()
    try:
        engine.wait_ready()
        yield folder, engine
    finally:
        engine.stop()


def test_a_request_that_was_aborted_while_it_waited_has_no_prompt_length_yet():
    """The reply of SGLang 0.5.23, TokenizerManager._handle_abort_req, for a request in its queue."""
    check_prompt_length({"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}, 9)
    answered = {"finish_reason": {"type": "stop"}, "prompt_tokens": 8}
    with pytest.raises(EngineError, match="made 8 tokens of a prompt with images that has 9 in training"):
        check_prompt_length({"output_ids": [1], "meta_info": answered}, 9)


@pytest.mark.slow
def test_an_engine_has_the_log_probs_of_transformers(served):
    folder, engine = served
    client, oracle = engine.wait_ready(), Oracle(folder)
    given = [
        ([*b"hello"], []),
        ([*b"see ", *PLACEHOLDER, *b"what?"], [A]),
        ([*b"see ", *PLACEHOLDER, *b"what?"], [B]),
        ([*b"x", *PLACEHOLDER, *PLACEHOLDER, 200, 130, *b"two"], [B, A]),
        ([*b"see ", *PLACEHOLDER, *b"what?"], [A]),
    ]
    prompts = [oracle.expanded(tokens, images) for tokens, images in given]
    images = []
    for prompt, (tokens, files) in zip(prompts, given, strict=True):
        images.append(SentImages(len(prompt), tokens, list(map(url, files))))
    params = SamplingParams(6, stop_token_ids=(IMAGE, VIDEO))
    responses = client.generate(prompts, params, images)
    for prompt, (_, files), one in zip(prompts, given, responses, strict=True):
        assert one.log_probs == pytest.approx(oracle.log_probs(prompt, one.tokens, files), abs=2e-5)
    [again] = client.generate(prompts[1:2], params, images[1:2])
    assert again.num_cached > len(given[1][0]), "keys and values of the image's tokens"
    [alone] = client.generate(prompts[:1], SamplingParams(2), images[:1])
    assert alone.tokens, "no prompt of a request has images"
    _refused(client, prompts[1], images[1])
    _resets(client)


def _refused(client: EngineClient, prompt: list[int], images: SentImages) -> None:
    """The engine counts an image's tokens otherwise: training has other settings."""
    longer = [*prompt, IMAGE]
    with pytest.raises(EngineError, match=rf"made {len(prompt)} tokens .* has {len(longer)} in training"):
        client.generate([longer], SamplingParams(2), [images._replace(num_tokens=len(longer))])
    with pytest.raises(EngineError, match="HTTP 400"):
        client.generate([prompt], SamplingParams(2), [images._replace(urls=[url(b"no image")])])
    assert client.generate([[*b"hello"]], SamplingParams(2))


def _resets(client: EngineClient) -> None:
    """The tower is among the weights that a proof of a sync overwrites; a table of positions is not."""
    before = client.weight_checksums()[0]
    client.reset_weights()
    after = client.weight_checksums()[0]
    assert {name for name in before if before[name] == after[name]} == set()
    assert any(name.startswith("visual.") for name in before) and not any("axis_map" in name for name in before)
