"""Scores of steps on their tokens, against a loop over prefixes; loss weights; fields on all ranks."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from character_tokenizer import character_tokenizer
from reward_pools import load
from samples_of import sample_of
from scored_responses import ScoredResponses, step_of
from spawn import run_ranks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from waiting import wait_until

from megappo.batch.exchange import Exchange
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.data.tokenizer import completing_tokens
from megappo.rollouts.responses import Responses
from megappo.rollouts.row_builder import RowBuilder, step_rewards
from megappo.rollouts.sample_rows import Sample, Segment
from megappo.userland.grades import Grade

TEXTS = (
    "hello",
    " world.",
    " 12 ",
    " ",
    "  ",
    "\u00e9",
    "\u4e2d\u6587",
    "\U0001f600",
    "\U0001f469\u200d\U0001f467",
    "n't",
)


def of_bytes() -> PreTrainedTokenizerFast:
    """As in the tokenizers of Qwen, Llama 3 and others, a character may be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["hello world 12 " * 9], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def of_sentence_piece() -> PreTrainedTokenizerFast:
    """As Llama 2's: bytes where a character is unknown, and a text's first space is dropped."""
    merges = [("h", "e"), ("he", "l"), ("\u2581", "w"), ("\u2581w", "o"), ("1", "2"), ("\u2581", "12")]
    pieces = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581helowrd12.n't"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


@pytest.mark.parametrize("make", [of_bytes, of_sentence_piece])
def test_a_step_ends_with_the_token_that_completes_its_last_character(make: Callable[[], PreTrainedTokenizerFast]):
    """Checked on texts, and on any bytes."""
    tokenizer, drawn = make(), random.Random(0)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    num_split = 0
    for i in range(300):
        tokens = tokenizer("".join(drawn.choices(TEXTS, k=drawn.randrange(1, 20))))["input_ids"]
        if i % 2 and make is of_bytes:  # what others make of bytes that are no text hangs together
            tokens = drawn.choices(range(len(tokenizer)), k=drawn.randrange(1, 40))
        text = decode(tokens)
        ends = sorted(drawn.sample(range(1, len(text) + 1), drawn.randrange(len(text) + 1)))
        prefixes = [decode(tokens[: last + 1]) for last in range(len(tokens))]
        expected = [next(i for i, prefix in enumerate(prefixes) if prefix[:end] == text[:end]) for end in ends]
        assert completing_tokens(tokens, ends, tokenizer) == expected
        num_split += any("\ufffd" in prefix for prefix in prefixes)
    assert num_split > 100


def test_a_step_that_an_environment_completes_ends_at_the_policys_last_token_before():
    tokenizer = of_bytes()
    written, observed, end = (tokenizer(text)["input_ids"] for text in ("\u4e2d1", "\u4e2d2", "3\u4e2d<eos>"))
    tokens = written + observed + end
    log_probs = [-1.0] * len(written) + [None] * len(observed) + [-1.0] * len(end)
    grade = Grade([1.0], {}, steps=[[(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 16.0)], [(3, 32.0)]])
    rewards = step_rewards(replace(sample_of(0, 0, tokens, log_probs), grade=grade), tokenizer)
    assert rewards == [0, 0, 0.5, 1 + 2 + 4 + 32, *[0] * len(observed), 8, 0, 0, 16, 0]


def make_config(num_prompts: int, **reward: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["f"], "train_batch_size": num_prompts},
            "rollout": {"n": 1, "environment": "json.decoder:JSONDecoder"},
            "trainer": {"output_dir": "o"},
            "reward": {"function": "rewards.py:f"} | reward,
        }
    )


def add_extras(rank: int, world_size: int) -> None:
    """Rank 1 has an episode of two segments without scores of steps; rank 2 has no sample."""
    exchange, tokenizer = Exchange(dist.group.WORLD), of_bytes()
    tokens = tokenizer("a1b2")["input_ids"]
    segments = [Segment([5], tokens[:3], [-1.0] * 3, [0.0, 0.0, 7.0], [1] * 3)]
    segments.append(Segment([5], tokens[3:], [-1.0], [1.0], [2]))
    prompts = [Prompt(i, [5], "", None) for i in range(2)]
    samples = [Sample(rank, 0, segments, "done", {})][: rank < 2]
    grades = [Grade([8.0, 1.0], {}, steps=[(), [(2, 0.5), (4, 0.25)]]), Grade([8.0, 1.0], {}, loss_weight=0.5)]

    def fields_of(grades: list[Grade], **reward: object) -> dict[str, list]:
        """Return the fields of all rows, in the order of prompts, on every rank."""
        responses = ScoredResponses(prompts, samples, grades)
        step = step_of(responses)
        rows = RowBuilder(make_config(2, **reward), 300, tokenizer, exchange).build(step)[0].rows
        fields = {name: values.tolist() for name, values in rows.fields.items()}
        found: dict[str, list] = {}
        for of_rank in exchange.all_gather(fields):
            for name, values in of_rank.items():
                found.setdefault(name, []).extend(values)
        return found

    found = fields_of(grades[rank : rank + 1])
    assert found["loss_weights"] == [1.0, 1.0, 0.5, 0.5]
    assert found["turn_rewards"] == [[0, 0.5, 7], [1.25, 0, 0], [0, 0, 7], [1, 0, 0]]
    assert found["scores"] == [9.75, 9.75, 9.0, 9.0]
    none = fields_of([Grade([1.0], {}, steps=[[]])] * len(samples))
    assert "loss_weights" not in none and none["turn_rewards"] == [[0, 0, 7], [1, 0, 0]] * 2
    message = (
        r"reward.normalize batch changes the score of a response, not the scores of its steps, .* rewards.py:f gives"
    )
    with pytest.raises(ConfigError, match=message):  # also on ranks without scores of steps
        fields_of(grades[rank : rank + 1], normalize="batch")


def test_an_extra_of_one_rank_is_a_field_on_all():
    run_ranks(3, add_extras)


def test_each_group_gets_the_scores_of_its_own_responses_in_any_order(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    prompts = [Prompt(i, [5], "p", 10 * i) for i in range(3)]
    body = "def f(prompts, responses, labels):\n    return [a + len(b) for a, b in zip(labels, responses)]"
    with load(tmp_path, body) as pool:
        responses = Responses(prompts, pool, tokenizer)
        groups = []
        for prompt in (2, 0, 1):
            group = [sample_of(prompt, i, [9] * (1 + i), [-1.0] * (1 + i)) for i in range(2)]
            groups.append((responses.add(group), group))
        responses.end()
        for positions, group in reversed(groups):
            wait_until(partial(responses.fill_if_scored, positions))
            for one in group:
                assert one.grade.scores == [10 * one.prompt_index + 1 + one.sample_index]
