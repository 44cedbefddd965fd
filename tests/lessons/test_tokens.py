"""The trainer scores the very tokens that were sampled, at the temperature of the sampling: bugs of others."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from ppo_engines import TEMPERATURE, Case, make_engine
from samples_of import sample_of
from scored_responses import step_of
from spawn import run_ranks
from tiny_models import hf_folder, hf_model
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megappo.batch.exchange import Exchange
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.rollouts.responses import Responses
from megappo.rollouts.row_builder import RowBuilder
from megappo.userland.grades import Grade
from megappo.userland.signatures import Row

MERGES = [("l", "l"), ("ll", "o"), ("h", "e"), ("he", "llo")]
VOCAB = {word: i for i, word in enumerate(["h", "e", "l", "o", *map("".join, MERGES)])}
PROMPT = Prompt(0, [VOCAB["o"], VOCAB["l"]], "ol", None)
SAMPLED = [[VOCAB["he"], VOCAB["llo"]], [VOCAB[word] for word in ("h", "e", "ll", "o")]]


def make_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(VOCAB, MERGES))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def make_config() -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["f"], "train_batch_size": 1},
            "trainer": {"output_dir": "o"},
            "rollout": {"n": len(SAMPLED), "temperature": TEMPERATURE},
        }
    )


class Rewards:
    """Stands where a pool of workers is, and reads what a reward function would."""

    on_error, failure, waits_for_all = "raise", "", False

    def begin(self) -> "Rewards":
        return self

    def add(self, rows: Sequence[Row]) -> None:
        assert [(row.prompt, row.response) for row in rows] == [("ol", "hello")] * 2

    def results(self) -> list[Grade]:
        return [Grade([1.0], {}), Grade([0.0], {})]


def hf_log_probs(model: torch.nn.Module, response: list[int], temperature: float) -> torch.Tensor:
    """Return Hugging Face's log-probs of a response to PROMPT."""
    tokens = torch.tensor(PROMPT.tokens + response)
    logits = model(tokens[None]).logits[0, len(PROMPT.tokens) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0].detach()


def check_collected(rank: int, world_size: int, folder: Path, log_probs: list[list[float]]) -> None:
    exchange = Exchange(dist.group.WORLD)
    config, tokenizer = make_config(), make_tokenizer()
    parts = enumerate(zip(SAMPLED, log_probs, strict=True))
    samples = [sample_of(0, i, tokens, of_tokens, prompt=PROMPT.tokens) for i, (tokens, of_tokens) in parts]
    responses = Responses([PROMPT], Rewards(), tokenizer)
    responses.add(samples)
    rows = RowBuilder(config, 91, tokenizer, exchange).build(step_of(responses))[0].rows
    assert [tokens.tolist() for tokens in rows.sequences] == [PROMPT.tokens + tokens for tokens in SAMPLED]
    case = Case(Layout((0,)), temperature=config.rollout.temperature)
    engine = make_engine(folder, case, build_groups({"actor": case.layout}, seed=0)["actor"], "actor")
    old = engine.forward(rows)["log_probs"]
    torch.testing.assert_close(old, rows.fields["rollout_log_probs"], rtol=0, atol=1e-5)


def test_the_trainer_and_the_engine_agree_about_what_was_sampled(tmp_path: Path) -> None:
    """Responses were decoded, and their text tokenized again for training: other tokens than those sampled, with other
    log-probs. https://github.com/huggingface/trl/issues/5224 and https://github.com/verl-project/verl/issues/6719

    And the trainer's log-probs lacked the temperature that the engine's had: https://github.com/NVIDIA-NeMo/RL/pull/316
    """
    folder, tokenizer = hf_folder(tmp_path / "hf", "qwen2", initializer_range=0.3), make_tokenizer()
    model = hf_model(folder)
    right = [hf_log_probs(model, tokens, TEMPERATURE) for tokens in SAMPLED]
    run_ranks(1, check_collected, folder, [of_tokens.tolist() for of_tokens in right])
    for tokens, of_tokens in zip(SAMPLED, right, strict=True):
        again = tokenizer.encode(tokenizer.decode(tokens))
        assert again == [VOCAB["hello"]]
        assert abs(float(hf_log_probs(model, again, TEMPERATURE).sum() - of_tokens.sum())) > 1
        assert (hf_log_probs(model, tokens, 1.0) - of_tokens).abs().max() > 0.1
