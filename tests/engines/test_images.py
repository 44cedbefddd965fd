"""Requests with images: what is sent, what is refused, and a real engine against transformers."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_vision
from tiny_vision import IMAGE, PLACEHOLDER, VIDEO, Oracle, noise

from megappo.config.schema import Rollout
from megappo.engines.client import EngineClient, EngineError
from megappo.engines.generations import SamplingParams, SentImage, check_prompt_length, generate_body, with_placeholders
from megappo.engines.process import Engine

A, B = noise(84, 112, 1), noise(60, 150, 2, "JPEG")


def url(image: bytes) -> str:
    return "data:image;base64," + base64.b64encode(image).decode()


def test_each_image_becomes_one_token():
    tokens = [1, 9, 9, 9, 2, 9, 3]
    images = [SentImage(1, 3, "a"), SentImage(5, 1, "b")]
    assert with_placeholders(tokens, images) == [1, 9, 2, 9, 3]
    body = generate_body([tokens, [7, 8]], SamplingParams(4), images=[images, []])
    assert body["input_ids"] == [[1, 9, 2, 9, 3], [7, 8]] and body["image_data"] == [["a", "b"], []]
    assert "image_data" not in generate_body([tokens], SamplingParams(4), images=[[]])


@pytest.mark.parametrize(
    ("tokens", "images", "expected"),
    [
        ([1, 9, 9, 2], [SentImage(1, 3, "a")], "expected 3 equal tokens of an image from 1 on"),
        ([1, 9, 9], [SentImage(1, 3, "a")], "expected 3 equal tokens"),
        ([1, 9, 9, 9], [SentImage(1, 2, "a"), SentImage(2, 2, "b")], "expected 2 equal tokens"),
        ([1, 9, 9, 2, 9], [SentImage(1, 2, "a")], "has 2 places for images, but 1 images"),
    ],
)
def test_tokens_that_do_not_fit_the_images_are_not_sent(tokens, images, expected):
    with pytest.raises(EngineError, match=expected):
        with_placeholders(tokens, images)


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


def sent(oracle: Oracle, prompt: list[int], images: list[bytes]) -> list[SentImage]:
    places = [place for place, token in enumerate(prompt) if token == IMAGE and prompt[place - 1] != IMAGE]
    counts = [int(grid.prod()) // 4 for grid in oracle.inputs(images).get("image_grid_thw", ())]
    return [SentImage(*one) for one in zip(places, counts, map(url, images), strict=True)]


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
    images = [sent(oracle, prompt, files) for prompt, (_, files) in zip(prompts, given, strict=True)]
    params = SamplingParams(6, stop_token_ids=(IMAGE, VIDEO))
    responses = client.generate(prompts, params, images)
    for prompt, (_, files), one in zip(prompts, given, responses, strict=True):
        assert one.log_probs == pytest.approx(oracle.log_probs(prompt, one.tokens, files), abs=2e-5)
    [again] = client.generate(prompts[1:2], params, images[1:2])
    assert again.num_cached > len(given[1][0]), "keys and values of the image's tokens"
    _refused(client, prompts[1], images[1])
    _resets(client)


def _refused(client: EngineClient, prompt: list[int], images: list[SentImage]) -> None:
    """The engine counts an image's tokens otherwise: training has other settings."""
    [image] = images
    longer = prompt[: image.place] + [IMAGE] + prompt[image.place :]
    with pytest.raises(EngineError, match=rf"made {len(prompt)} tokens .* has {len(longer)} in training"):
        client.generate([longer], SamplingParams(2), [[image._replace(num_tokens=image.num_tokens + 1)]])
    with pytest.raises(EngineError, match="HTTP 400"):
        client.generate([prompt], SamplingParams(2), [[image._replace(url=url(b"no image"))]])
    assert client.generate([[*b"hello"]], SamplingParams(2))


def _resets(client: EngineClient) -> None:
    """The tower is among the weights that a proof of a sync overwrites; a table of positions is not."""
    before = client.weight_checksums()[0]
    client.reset_weights()
    after = client.weight_checksums()[0]
    assert {name for name in before if before[name] == after[name]} == set()
    assert any(name.startswith("visual.") for name in before) and not any("axis_map" in name for name in before)
