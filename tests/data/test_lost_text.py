"""A tokenizer that does not know a text's characters, unlike tokenizers that only normalise."""

import json

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megappo.config.schema import Data
from megappo.data.prompt_checks import loses_text
from megappo.data.prompts import PromptDataset

TEXT = "What is 3 plus 4?"


def digits(*, unknown: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer of digits alone: other characters are dropped, or become an unknown token."""
    words = [unknown or "<unk>", "<eos>", *"0123456789+="]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    if unknown is None:
        core.normalizer = normalizers.Replace(Regex("[^0-9+=]"), "")
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token=unknown)


@pytest.mark.parametrize(("unknown", "lines"), [(None, "2, 4"), ("<unk>", "2, 3, 4")])
def test_prompts_whose_text_is_lost_are_reported_once(tmp_path, unknown, lines):
    records = [{"prompt": prompt, "label": "7"} for prompt in ("3+4=", TEXT, "Why is that?", "Is 12 more?")]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = digits(unknown=unknown)
    dataset = PromptDataset([str(tmp_path / "d.jsonl")], tokenizer, Data(train_files=["d"], max_prompt_length=64), 0)
    halves = (lambda size: range(size // 2), lambda size: range(size // 2, size))  # as two ranks look at it
    parts = [dataset.check(len(tokenizer), half) for half in halves]
    found = [warning for warning in dataset.warnings(parts) if "loses" in warning]
    assert len(found) == 1
    assert f"{tmp_path}/d.jsonl lines {lines}: the tokenizer loses at least half of the prompt's characters" in found[0]


class Decoder:
    """A tokenizer that decodes anything to one text."""

    unk_token = "<unk>"

    def __init__(self, decoded: str):
        self._decoded = decoded

    def decode(self, tokens: list[int]) -> str:
        return self._decoded


@pytest.mark.parametrize(
    ("text", "decoded"),
    [
        (TEXT, "whatis3plus4?"),
        ("O\u00f9 est l'\u00e9l\u00e8ve", "ou est l'eleve"),
        ("\ufb01ne \u2460", "fine 1"),
        ("<s>user: 3+4=", "<s> user : 3 + 4 ="),
        ("12345", "<unk>2345"),
        (" ", ""),
    ],
)
def test_what_is_only_written_otherwise_is_not_lost(text, decoded):
    assert not loses_text(text, [], Decoder(decoded))
    assert loses_text(TEXT, [], Decoder("3 <unk>4"))
