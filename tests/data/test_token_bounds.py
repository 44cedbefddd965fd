"""Bounds on a text's tokens, against the tokens themselves."""

import random
import time
import unicodedata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megappo.config.schema import Data
from megappo.data.prompts import PromptDataset
from megappo.data.token_bounds import TokenBounds

CORPUS = ["How much is 12 + 345? " * 3, "def f(x):\n        return x\n", "na\u00efve caf\u00e9 \u4f60\u597d"] * 20
ALPHABET = [*"ab12 \n\t.,'\u00e9\u4f60\U0001f600\u0000", "e\u0301", "\u03b1\u0313\u0300\u0345", "  ", "<s>", "<think>"]
BLANK = "\u2581"


def over_bytes(**changes: object) -> Tokenizer:
    """Of GPT-2's kind, as Llama 3 and Qwen have it."""
    core = Tokenizer(models.BPE())
    core.normalizer = changes.get("normalizer", normalizers.NFC())
    cut = changes.get("cut", pre_tokenizers.Split(" ", "merged_with_next"))
    spell = pre_tokenizers.ByteLevel(add_prefix_space=changes.get("add_prefix_space", False), use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if changes.get("alphabet", True) else []
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return core


def with_byte_fallback() -> Tokenizer:
    """Of Llama 2's kind."""
    symbols = [BLANK, *"abHow", *(f"<0x{byte:02X}>" for byte in range(256)), BLANK * 2, BLANK + "a", "ab"]
    merges = [(BLANK, BLANK), (BLANK, "a"), ("a", "b")]
    vocab = {symbol: number for number, symbol in enumerate(["<unk>", *symbols])}
    core = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    return core


def wrapped(core: Tokenizer, *more: AddedToken) -> PreTrainedTokenizerBase:
    core.add_special_tokens(["<s>", AddedToken("<think>", normalized=True), *more])
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("core", [over_bytes, with_byte_fallback])
def test_the_bounds_hold_for_any_text(core):
    tokenizer = wrapped(core())
    bounds = TokenBounds(tokenizer)
    rng = random.Random(0)
    decided = 0
    for length in [1, 2, 5, 20, 200] * 60:
        text = "".join(rng.choices(ALPHABET, k=length))
        found = len(tokenizer(text)["input_ids"])
        assert bounds.at_least(text) <= found <= bounds.at_most(text), text
        decided += bounds.at_least(text) > length / 40 or bounds.at_most(text) < 4 * length + 10
    assert decided > 100, "bounds that say nothing would hold too"


def test_what_composes_to_fewer_characters_is_counted_as_such():
    tokenizer = wrapped(over_bytes())
    text = "\u03b1\u0313\u0300\u0345" * 4000  # four characters that NFC makes one
    assert len(unicodedata.normalize("NFC", text)) * 4 == len(text)
    bounds = TokenBounds(tokenizer)
    assert bounds.at_least(text) * 4 <= bounds.at_least("a" * len(text)) + 4
    assert bounds.at_most(text) == float("inf")


LOSING = {
    "words": Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    "no alphabet": over_bytes(alphabet=False),
    "blanks are removed": over_bytes(cut=pre_tokenizers.Split(" ", "removed")),
    "blanks are stripped": over_bytes(normalizer=normalizers.Strip()),
    "blanks are added": over_bytes(add_prefix_space=True),
    "words by blanks": over_bytes(cut=pre_tokenizers.WhitespaceSplit()),
}


@pytest.mark.parametrize("name", LOSING)
def test_nothing_is_said_of_tokenizers_that_lose_or_add_something(name):
    bounds = TokenBounds(wrapped(LOSING[name]))
    assert (bounds.at_least("a " * 10**6), bounds.at_most("a")) == (0, float("inf"))


def test_added_tokens_that_swallow_blanks_leave_the_upper_bound_alone():
    tokenizer = wrapped(over_bytes(), AddedToken("<eat>", lstrip=True, rstrip=True))
    text = "<eat>" + " " * 10_000 + "<eat>"
    bounds = TokenBounds(tokenizer)
    assert bounds.at_least(text) <= len(tokenizer(text)["input_ids"]) <= bounds.at_most(text)


def test_a_prompt_of_megabytes_is_refused_at_once(tmp_path: Path):
    (tmp_path / "d.jsonl").write_text(
        '{"prompt": "1+1=", "label": 2}\n{"prompt": "' + "1+1 " * 5_000_000 + '", "label": 2}\n'
    )
    file = str(tmp_path / "d.jsonl")
    data = PromptDataset([file], wrapped(over_bytes()), Data(train_files=(file,)), 0)
    start = time.process_time()
    [error] = data.fault_lines([data.check(1000)])
    assert time.process_time() - start < 5  # tokenising it takes a minute and gigabytes
    assert error.startswith(f"data.train_files: {file} line 2: the prompt has 20,000,000 characters, so at least ")


def test_short_prompts_are_tokenised_where_the_tokenizer_knows_more_than_the_model(tmp_path: Path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1=", "label": 2}\n{"prompt": "<think>", "label": 2}\n')
    file = str(tmp_path / "d.jsonl")
    tokenizer = wrapped(over_bytes())
    known = tokenizer.convert_tokens_to_ids("<think>")
    data = PromptDataset([file], tokenizer, Data(train_files=(file,)), 0)
    [error] = data.fault_lines([data.check(known)])
    assert error.startswith(f"data.train_files: {file} line 2: the prompt has token {known}, for which")
    assert data.fault_lines([data.check(known + 1)]) == []
