"""Pairs that a reward model learns from: the forms of files, the tokens that are scored, and the faults of records."""

import json
from pathlib import Path

import pytest
from character_tokenizer import CHARACTERS, EOS, TALK, character_tokenizer
from transformers import PreTrainedTokenizerFast

from megappo.config.config_error import ConfigError
from megappo.config.schema import Data
from megappo.data.preferences import PreferenceDataset

WORSE = [TALK[0], {"role": "assistant", "content": "5"}]
HUMAN = "\n\nHuman: 2+2?\n\nAssistant: "


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


def faults(of: PreferenceDataset) -> list[str]:
    return of.errors([of.check(len(CHARACTERS) + 1)])


def dataset(
    folder: Path, tokens: PreTrainedTokenizerFast, *records: dict, padding: int | None = None, **keys: object
) -> PreferenceDataset:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = Data.model_validate({"train_files": str(path), "shuffle": False, "train_batch_size": 1, **keys})
    return PreferenceDataset([str(path)], tokens, [0], config, seed=0, padding=padding)


@pytest.mark.parametrize(
    ("record", "keys", "texts"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, {}, ("2+2=4" + EOS, "2+2=5" + EOS)),
        ({"question": "2+2=", "chosen": "4" + EOS, "rejected": "5"}, {}, ("2+2=4" + EOS, "2+2=5" + EOS)),
        ({"chosen": HUMAN + "4", "rejected": HUMAN + "5"}, {}, (HUMAN + "4" + EOS, HUMAN + "5" + EOS)),
        (
            {"q": "2+2=", "better": "4", "worse": "5"},
            {"columns": {"prompt": "q", "chosen": "better", "rejected": "worse"}},
            ("2+2=4" + EOS, "2+2=5" + EOS),
        ),
        ({"chosen": TALK[:2], "rejected": WORSE}, {}, (TALK[:2], WORSE)),
        ({"prompt": "2+2?", "chosen": TALK[:2], "rejected": WORSE}, {}, (TALK[:2], WORSE)),
        ({"prompt": TALK[:1], "chosen": TALK[1:2], "rejected": WORSE[1:]}, {}, (TALK[:2], WORSE)),
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, {"apply_chat_template": True}, (TALK[:2], WORSE)),
        ({"prompt": TALK[:3], "chosen": "5.", "rejected": "6"}, {}, (TALK, [*TALK[:3], TALK[1] | {"content": "6"}])),
    ],
    ids=["texts", "question", "whole texts", "columns", "messages", "ultrafeedback", "parts", "template", "turns"],
)
def test_both_conversations_are_scored_at_their_last_token(tmp_path, tokenizer, record, keys, texts):
    of = dataset(tmp_path, tokenizer, record, **keys)
    [pair] = of.at([0])
    for row, text in zip(pair.rows, texts, strict=True):
        whole = text if isinstance(text, str) else tokenizer.apply_chat_template(text, tokenize=False).rstrip("\n")
        assert tokenizer.decode(row.tokens) == whole
        assert row.mask == [0] * (len(row.tokens) - 1) + [1]
    assert faults(of) == [] and pair.margin == 0


def test_margins_are_read_and_padding_is_not(tmp_path, tokenizer):
    record = {"prompt": "2+2=", "chosen": "4", "rejected": "5", "margin": 0.5}
    [pair] = dataset(tmp_path, tokenizer, record, padding=0).at([0])
    assert [tokenizer.decode(row.tokens) for row in pair.rows] == ["2+2=4", "2+2=5"]
    assert pair.margin == 0.5 and pair.fields == {"margins": 0.5}
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    [pair] = dataset(tmp_path, tokenizer, record, columns=columns).at([0])
    assert pair.margin == 0


@pytest.mark.parametrize(
    ("record", "keys", "fault"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "4"}, {}, "chosen and rejected are equal, a tie"),
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5", "tie": True}, {}, "the record is a tie"),
        ({"prompt": "2+2=", "chosen": "", "rejected": "5"}, {}, "the response is empty"),
        ({"prompt": "2+2=", "chosen": 4, "rejected": "5"}, {}, "expected a list of"),
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5", "margin": "big"}, {}, "expected a number as the margin"),
        ({"prompt": "3+3?", "chosen": TALK[:2], "rejected": WORSE}, {}, "the prompt '3+3?' is not in the conversation"),
        ({"chosen": TALK[:3], "rejected": WORSE}, {}, "a conversation ends with a message of the user"),
        ({"chosen": TALK[1:2], "rejected": WORSE}, {}, "the first message is the assistant's"),
        ({"chosen": 4, "rejected": "5"}, {}, "expected a list of"),
        ({"chosen": [*TALK[:3], TALK[3] | {"weight": 0}], "rejected": WORSE}, {}, "which is scored, has weight 0 or"),
        ({"chosen": [TALK[0], TALK[1] | {"train": 2}], "rejected": WORSE}, {}, "expected 0 or 1 as weight and train"),
        ({"prompt": "2+2=", "chosen": "4444", "rejected": "5"}, {"max_length": 8}, "more tokens than data.max_length"),
    ],
)
def test_faults_name_the_line(tmp_path, tokenizer, record, keys, fault):
    is_chat = isinstance(record["chosen"], list)
    right = {"chosen": TALK[:2], "rejected": WORSE} if is_chat else {"chosen": "4", "rejected": "5"}
    right |= {"prompt": "2+2?"} if "prompt" in record else {}
    right |= {"margin": 1} if "margin" in record else {}
    [error] = faults(dataset(tmp_path, tokenizer, right | {"tie": False}, record, **keys))
    assert fault in error and f"{tmp_path / 'pairs.jsonl'} line" in error


def test_whole_texts_have_no_chat_template(tmp_path, tokenizer):
    of = dataset(tmp_path, tokenizer, {"chosen": HUMAN + "4", "rejected": HUMAN + "5"}, apply_chat_template=True)
    assert "line 1: the responses are texts without a prompt" in faults(of)[0]


def test_files_without_a_known_form_are_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="columns, such as {chosen: better, rejected: worse}"):
        dataset(tmp_path, tokenizer, {"prompt": "2+2=", "response": "4"})
