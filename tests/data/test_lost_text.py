"""A tokenizer that does not know a text's characters, unlike those that only normalise."""

import json

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megappo.config.schema import Data
from megappo.data.prompt_checks import lost_text
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


@pytest.mark.parametrize(("unknown", "seen"), [(None, "3 4"), ("<unk>", "<unk>")])
def test_a_file_whose_text_is_lost_is_reported_once(tmp_path, unknown, seen):
    records = [{"prompt": prompt, "label": "7"} for prompt in ("3+4=", TEXT, "Why is that?", "Is 12 more?")]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = digits(unknown=unknown)
    dataset = PromptDataset([str(tmp_path / "d.jsonl")], tokenizer, Data(train_files=["d"], max_prompt_length=64), 0)
    halves = (lambda size: range(size // 2), lambda size: range(size // 2, size))  # as two ranks look at it
    parts = [dataset.check(len(tokenizer), half) for half in halves]
    [warning] = dataset.warnings(parts)
    assert warning.startswith(
        f"data.train_files: {tmp_path}/d.jsonl line 2: the tokenizer loses 11 of the 13 characters, blanks aside, "
        f"of '{TEXT}': the model sees '{seen}"
    )


@pytest.mark.parametrize(
    ("text", "decoded"),
    [
        (TEXT, "whatis3plus4?"),
        ("Où est l'élève", "ou est l'eleve"),
        ("\ufb01ne \u2460", "fine 1"),
        ("<s>user: 3+4=", "<s> user : 3 + 4 ="),
        ("12345", "<unk>2345"),
        (" ", ""),
    ],
)
def test_what_is_only_written_otherwise_is_not_lost(text, decoded):
    assert lost_text(text, decoded, "<unk>") == ""
