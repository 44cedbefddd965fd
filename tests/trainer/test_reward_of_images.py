"""A reward model sees the images of prompts: its scores against transformers'; what would lose them is refused."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import tiny_vision
import torch
import torch.distributed as dist
from ppo_engines import with_score
from safetensors.torch import load_file
from samples_of import sample_of
from spawn import run_ranks
from tiny_vision import PLACEHOLDER, Oracle, noise

from megappo.batch.exchange import Exchange
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.data.image_files import image_reader
from megappo.data.prompt_images import PromptImages
from megappo.data.prompts import open_datasets
from megappo.data.tokenizer import load_tokenizer
from megappo.placement.components import components_of
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.rollouts.responses import Responses
from megappo.rollouts.sample_rows import sample_rows
from megappo.trainer.component_batch import Component
from megappo.trainer.models import build_engine
from megappo.trainer.response_scorer import ResponseScorer

IMAGES = [noise(60, 150, 1), noise(84, 112, 2, "JPEG")]
TEXTS = ["none", "<image>one", "<image><image>two", "<image>one"]
TOKENS = [[*PLACEHOLDER] * text.count("<image>") + [*text.replace("<image>", "").encode()] for text in TEXTS]
RESPONSES = [[*b"x"], [*b"right"], [*b"wrong"], [*b"right"]]


def given(number: int) -> list[bytes]:
    """Return the images of a prompt: the last one has another than the second."""
    return [IMAGES[1]] if number == 3 else IMAGES[: TEXTS[number].count("<image>")]


def write(home: Path) -> list[float]:
    """Write an actor, a reward model and prompts; return transformers' scores of the responses."""
    actor = tiny_vision.vision_folder(home / "actor", "qwen3_vl")
    shutil.copytree(actor, home / "reward")
    with_score(home / "reward")
    settings = json.loads((home / "reward" / "config.json").read_text())
    settings["architectures"] = ["Qwen3VLForSequenceClassification"]
    (home / "reward" / "config.json").write_text(json.dumps(settings))
    for name, image in zip("ab", IMAGES, strict=True):
        (home / name).write_bytes(image)
    names = dict(zip(IMAGES, "ab", strict=True))
    records = [{"prompt": text, "images": [names[one] for one in given(i)]} for i, text in enumerate(TEXTS)]
    (home / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    weights = {name: one for file in (home / "reward").glob("*.safetensors") for name, one in load_file(file).items()}
    oracle = Oracle(actor)
    scores = []
    for number, (prompt, response) in enumerate(zip(TOKENS, RESPONSES, strict=True)):
        images = given(number)
        tokens = torch.tensor([[*oracle.expanded(prompt, images), *response]])
        inputs = oracle.inputs(images)
        if images:
            inputs["mm_token_type_ids"] = (tokens == tiny_vision.IMAGE).int()
        with torch.no_grad():
            hidden = oracle.model.model(input_ids=tokens, **inputs).last_hidden_state[0, -1]
        scores.append(float(hidden @ weights["score.weight"][0]))
    return scores


def check(rank: int, world_size: int, home: Path, expected: list[float]) -> None:
    config = Config.model_validate(
        {
            "model": {"path": str(home / "actor"), "dtype": "fp32"},
            "data": {"train_files": [str(home / "train.jsonl")]},
            "reward": {"function": None},
            "reward_model": {"model_path": str(home / "reward"), "max_tokens_per_micro_batch": 128},
            "trainer": {"output_dir": str(home)},
        }
    )
    exchange = Exchange(dist.group.WORLD)
    tokenizer = load_tokenizer(str(home / "actor"))
    reader = image_reader(config, tokenizer)
    dataset, _ = open_datasets(config, tokenizer, images=reader)
    prompts = dataset.at(range(len(TEXTS)))
    responses = Responses(prompts, None, tokenizer)
    samples = []
    for number, (prompt, tokens) in enumerate(zip(prompts, RESPONSES, strict=True)):
        samples.append(sample_of(number, 0, tokens, [-1.0] * len(tokens), "length", prompt=prompt.tokens))
    responses.add(samples)
    batch = exchange.number(sample_rows(samples, prompts=prompts))
    batch.rows.fields["scores"] = torch.zeros(len(samples))
    spec = components_of(config)["reward_model"]
    layout = Layout((0,))
    engine = build_engine(config, spec, build_groups({"reward_model": layout}, seed=0)["reward_model"])
    engine.image_source = PromptImages(reader, [dataset], str(home))
    parts = Component("reward_model", spec, layout, exchange, engine), dataset, tokenizer, exchange
    scorer = ResponseScorer(config, *parts)
    conversations = scorer.scatter(batch, responses)
    rows = scorer.add_scores(batch, conversations, scorer.forward(conversations, lambda name: nullcontext())).rows
    torch.testing.assert_close(rows.fields["reward_model_scores"], torch.tensor(expected), rtol=0, atol=2e-5)
    with pytest.raises(ConfigError, match="rendered again, which does not place images: name a reward model with"):
        ResponseScorer(config.changed("reward_model.retokenize", True), *parts)


def test_scores_are_transformers_with_the_images(tmp_path: Path) -> None:
    expected = write(tmp_path)
    assert abs(expected[1] - expected[3]) > 1e-3, "another image, another score"
    run_ranks(1, check, tmp_path, expected)
