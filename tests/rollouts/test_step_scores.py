"""Scores of steps on their tokens, against a loop over prefixes; loss weights; fields on all ranks."""

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megappo.batch.exchange import Exchange
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.rollouts.episodes import Episode
from megappo.rollouts.sample_rows import sample_rows, total_scores, with_scores
from megappo.rollouts.sampler import Sample
from megappo.rollouts.step_scores import completing_tokens, extra_fields, extra_kinds, step_rewards
from megappo.rollouts.transcript import Segment
from megappo.userland.grades import Graded

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
    """As those of Qwen, Llama 3 and others: a character may be several tokens."""
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
        assert completing_tokens(tokens, text, ends, decode) == expected
        num_split += any("\ufffd" in prefix for prefix in prefixes)
    assert num_split > 100


def test_a_step_that_an_environment_completes_ends_at_the_policys_last_token_before():
    tokenizer = of_bytes()
    written, observed, end = (tokenizer(text)["input_ids"] for text in ("\u4e2d1", "\u4e2d2", "3\u4e2d<eos>"))
    tokens = written + observed + end
    log_probs = [-1.0] * len(written) + [None] * len(observed) + [-1.0] * len(end)
    graded = Graded([1.0], {}, steps=[[(1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (5, 8.0), (6, 16.0)], [(3, 32.0)]])
    rewards = step_rewards(Sample(0, 0, tokens, log_probs, "stop"), graded, tokenizer)
    assert rewards == [0, 0, 0.5, 1 + 2 + 4 + 32, *[0] * len(observed), 8, 0, 0, 16, 0]


def make_config(**reward: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["f"]},
            "trainer": {"output_dir": "o"},
            "reward": {"function": "rewards.py:f"} | reward,
        }
    )


def add_extras(rank: int, world_size: int) -> None:
    """Rank 1 has an episode of two segments, without scores of steps; rank 2 has no sample."""
    exchange, tokenizer = Exchange(dist.group.WORLD), of_bytes()
    tokens = tokenizer("a1b2")["input_ids"]
    segments = [Segment([5], "", tokens[:3], [-1.0] * 3, [0.0, 0.0, 7.0], [1] * 3)]
    segments.append(Segment([5], "", tokens[3:], [-1.0], [1.0], [2]))
    sample = Sample(0, 0, tokens, [-1.0] * 4, "stop", Episode(segments, "done", {}))
    graded = [Graded([8.0, 1.0], {}, steps=[(), [(2, 0.5), (4, 0.25)]]), Graded([8.0, 1.0], {}, loss_weight=0.5)]
    mine = graded[rank : rank + 1]
    samples = [sample] * len(mine)
    kinds = exchange.share(extra_kinds(mine))
    fields = extra_fields(make_config(), samples, mine, tokenizer, kinds)
    scores = torch.tensor([one.totals for one in mine]).reshape(-1, 2)
    rows = with_scores(sample_rows(samples, [Prompt(0, [5], "", None)], episodes=True), samples, scores, **fields)
    found = {name: values.tolist() for name, values in rows.fields.items() if name in ("loss_weights", "turn_rewards")}
    by_rank = {
        0: {"loss_weights": [1.0, 1.0], "turn_rewards": [[0, 0.5, 7], [1.25, 0, 0]]},
        1: {"loss_weights": [0.5, 0.5], "turn_rewards": [[0, 0, 7], [1, 0, 0]]},
        2: {"loss_weights": [], "turn_rewards": []},
    }
    assert found == by_rank[rank]
    assert total_scores(scores).tolist() == [[9.75], [9.0], []][rank]
    none = [Graded([1.0], {}, steps=[[]])] * len(samples)
    assert extra_fields(make_config(clip=1.0), samples, none, tokenizer, exchange.share(extra_kinds(none))) == {}
    message = r"reward.normalize .batch. changes the score of a response, not those of its steps, .* rewards.py:f gives"
    with pytest.raises(ConfigError, match=message):  # also on ranks without scores of steps
        extra_fields(make_config(normalize="batch"), samples, mine, tokenizer, kinds)


def test_an_extra_of_one_rank_is_a_field_on_all():
    run_ranks(3, add_extras)
