"""Scores of a reward model that `megappo serve` serves on a CPU, against transformers'."""

import tempfile
from pathlib import Path

import pytest
import torch
from reward_pools import rows_of
from served_folder import CHARACTERS, save_character_tokenizer, served
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from megappo.userland.rewards import RewardError, load_reward

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROMPTS = ["37+45=", "37+45=", "(12+a)*b", "d"]
RESPONSES = ["82", "7", "12*b+a*b", "0 1 2 3"]
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {"vocab_size": len(CHARACTERS), "num_key_value_heads": 2, "max_position_embeddings": 128}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def reward_model(folder: Path) -> Path:
    """Write a random reward model with a tokenizer of characters."""
    torch.manual_seed(3)
    config = AutoConfig.for_model("llama", **SHAPE, **SIZES, **TOKENS, num_labels=1, initializer_range=0.2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    save_character_tokenizer(folder)
    return folder


def transformers_scores(folder: Path, end: str) -> list[float]:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    scores = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        with torch.no_grad():
            scores.append(float(model(torch.tensor([tokenizer(prompt + response + end)["input_ids"]])).logits[0, 0]))
    return scores


def test_scores_are_transformers(tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "judge")
    expected = transformers_scores(folder, "C")
    with (
        tempfile.TemporaryDirectory(prefix="serve-") as home,
        served(folder, Path(home), "--dtype", "float32") as (_, client),
    ):
        options = {"engine": {"url": str(client.base_url), "begin": "B", "end": "C"}}
        with load_reward("engine", num_workers=1, timeout_seconds=60, options=options) as pool:
            grades = pool.score(rows_of(["B" + prompt for prompt in PROMPTS], RESPONSES, [None] * 4))
        found = [score for one in grades for score in one.scores]
        assert len(found) == 4 and torch.tensor(expected).std() > 0.1
        assert found == pytest.approx(expected, abs=1e-4)


def test_a_language_model_gives_no_scores(checkpoint: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="serve-") as home, served(checkpoint, Path(home)) as (_, client):
        options = {"engine": {"url": str(client.base_url), "retries": 0}}
        pool = load_reward("engine", num_workers=1, timeout_seconds=60, options=options)
        with pytest.raises(RewardError, match="reward function engine (?s:.*)refused .HTTP 400"):
            pool.score(rows_of(PROMPTS, RESPONSES, [None] * 4))
