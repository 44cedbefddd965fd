"""Examples of fine-tuning: the columns that files have, the tokens with a loss, and the faults of records."""

import json
import re
from pathlib import Path

import pytest
from character_tokenizer import CHARACTERS, EOS, TALK, character_tokenizer
from transformers import PreTrainedTokenizerFast

from megappo.config.config_error import ConfigError
from megappo.config.schema import Data
from megappo.data.examples import Example, ExampleDataset


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


def dataset(folder: Path, tokenizer: PreTrainedTokenizerFast, *records: dict, **keys: object) -> ExampleDataset:
    path = folder / "examples.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = Data.model_validate({"train_files": str(path), "shuffle": False, "train_batch_size": 1, **keys})
    return ExampleDataset([str(path)], tokenizer, [0], config, seed=0)


def learned(tokenizer: PreTrainedTokenizerFast, example: Example) -> str:
    """Return the texts of an example with a loss, with | between them."""
    text = ""
    for token, mask in zip(example.tokens, example.mask, strict=True):
        text += tokenizer.decode([token]) if mask else "|"
    return re.sub(r"\|+", "|", text).strip("|")


def faults(of: ExampleDataset) -> list[str]:
    return of.errors([of.check(len(CHARACTERS) + 1)])


def test_the_mask_of_a_conversation_is_that_of_transformers(tmp_path, tokenizer):
    [example] = dataset(tmp_path, tokenizer, {"messages": TALK}).at([0])
    expected = tokenizer.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=True)
    size = len(example.tokens)
    assert example.tokens == expected["input_ids"][:size] and example.mask == expected["assistant_masks"][:size]
    assert not any(expected["assistant_masks"][size:]) and sum(example.mask) == len("4") + len("5.") + 2


@pytest.mark.parametrize(
    ("record", "keys", "text"),
    [
        ({"prompt": "2+2=", "response": "4"}, {}, "4" + EOS),
        ({"prompt": "2+2=", "completion": "4" + EOS, "source": 7}, {}, "4" + EOS),
        ({"question": "2+2=", "answer": "4"}, {}, "4" + EOS),
        ({"q": {"text": "2+2="}, "a": "4"}, {"columns": {"prompt": "q.text", "response": "a"}}, "4" + EOS),
        ({"prompt": "2+2?", "response": "4"}, {"apply_chat_template": True}, "4" + EOS),
        ({"prompt": TALK[:3], "response": "5."}, {}, "5." + EOS),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, {"train_on": "last"}, "5." + EOS),
        ({"messages": TALK}, {"system_prompt": "Add."}, f"4{EOS}|5.{EOS}"),
        ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, {}, "4" + EOS),
    ],
)
def test_columns_as_people_have_them(tmp_path, tokenizer, record, keys, text):
    of = dataset(tmp_path, tokenizer, record, **keys)
    [example] = of.at([0])
    assert learned(tokenizer, example) == text and faults(of) == []


@pytest.mark.parametrize(
    ("record", "keys", "fault"),
    [
        ({"messages": TALK[:1]}, {}, "no message of the assistant, which could be learned: add one"),
        ({"messages": TALK[1:]}, {}, "the first message is the assistant's: begin with one that it answers"),
        ({"messages": "hello"}, {}, "expected a list of {'role': str, 'content': str}, found 'hello'"),
        ({"messages": [TALK[0], {"role": "assistant", "content": " "}]}, {}, "a message of the assistant is empty"),
        ({"prompt": "2+2=", "response": ""}, {}, "the response is empty"),
        ({"prompt": "2+2=", "response": 4}, {}, "expected a text, as the prompt is one, found the response 4"),
        ({"a": 1}, {"columns": {"messages": "talk"}}, "no field 'talk': correct data.columns, or add it"),
    ],
)
def test_faults_of_records_are_named(tmp_path, tokenizer, record, keys, fault):
    of = dataset(tmp_path, tokenizer, record, **keys)
    [error] = faults(of)
    fields = f"; the file has: {', '.join(record)}" if fault.startswith("no field") else ""
    assert (
        error == f"data.train_files: {of.files[0].path} line 1: {fault} (data.on_bad_row=skip leaves such out){fields}"
    )


def test_a_file_without_known_columns_is_refused_with_those_that_it_has(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"has the fields input, target; expected one of: messages; .*data\.columns"):
        dataset(tmp_path, tokenizer, {"input": "2+2=", "target": "4"})


def test_long_examples_are_errors_or_left_out(tmp_path, tokenizer):
    records = [{"prompt": "2+2=", "response": "4"}, {"prompt": "1000+1000=", "response": "2000"}]
    assert (
        "the example has more tokens than data.max_length 10 (15): raise it"
        in faults(dataset(tmp_path, tokenizer, *records, max_length=10))[0]
    )
    of = dataset(tmp_path, tokenizer, *records, max_length=10, too_long="skip")
    assert faults(of) == [] and "left out" in of.leave_out([of.check(97)])[0] and len(of) == 1


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.role == 'user' %}{{ m.content }}{% endif %}"
         "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}", "drops the text of an answer"),
        ("{% for m in messages %}{{ '[' + m.role + ']' + (m.content if loop.last else m.content[-1:]) }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}", "set data.train_on=last"),
    ],
)  # fmt: skip
def test_a_template_that_changes_answers_is_refused(tmp_path, tokenizer, template, fault):
    changed = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token=EOS)
    changed.chat_template = template
    of = dataset(tmp_path, changed, {"messages": TALK})
    assert fault in faults(of)[0]


@pytest.mark.parametrize(
    ("ending", "ends"),
    [("", "writes nothing after an answer"), ("!", "ends a message with '!'"), (EOS, None)],
)
def test_a_template_from_which_no_end_is_learned_gives_a_warning(tmp_path, tokenizer, ending, ends):
    without_end = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token=EOS)
    without_end.chat_template = (
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '" + ending + "' }}{% endfor %}"
    )
    of = dataset(tmp_path, without_end, {"messages": TALK[:2]})
    found = of.warnings([of.check(len(CHARACTERS) + 1)])
    if ends is None:
        assert found == []
        return
    [warning] = found
    assert warning == (
        f"data.train_files: the chat template {ends}, and responses end with {EOS}: a model that writes chat messages "
        f"will not stop; have the template of the tokenizer in model.path write {EOS} after an answer"
    )
