"""Chat messages, and texts that become messages: what the template is given, and what is refused."""

import json
from pathlib import Path

import pytest
from planning import all_of, errors_of, plan_here, write_run
from transformers import PreTrainedTokenizerBase

from megappo.config.config_error import ConfigError
from megappo.config.schema import Data
from megappo.data.prompts import PromptDataset
from megappo.data.tokenizer import load_tokenizer
from megappo.userland.signatures import InputSpec

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is defined and not enable_thinking %} 2{% endif %}"
    "{% endif %}"
)
QUESTION, SYSTEM = {"role": "user", "content": "1+1="}, {"role": "system", "content": "2="}
PROMPTS = ["1+1=", [QUESTION], [SYSTEM, QUESTION]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path)
    lines = (json.dumps({"prompt": prompt, "label": "2"}) + "\n" for prompt in PROMPTS)
    (tmp_path / "train.jsonl").write_text("".join(lines))
    return tmp_path


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(str(folder / "model"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def opened(folder: Path, tokenizer: PreTrainedTokenizerBase, **keys: object) -> PromptDataset:
    file = str(folder / "train.jsonl")
    takes = InputSpec((), (), raw_prompts=True)
    return PromptDataset([file], tokenizer, Data(train_files=(file,), max_prompt_length=99, **keys), 0, takes=takes)


def test_texts_stay_texts_and_messages_go_through_the_template(folder, tokenizer):
    user = "user: 1+1=\nassistant:"
    assert [prompt.text for prompt in all_of(opened(folder, tokenizer))] == ["1+1=", user, f"system: 2=\n{user}"]


@pytest.mark.parametrize("system", [None, "1=", ""])
@pytest.mark.parametrize("given", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_a_system_prompt_and_variables_are_what_the_template_is_given(folder, tokenizer, system, given):
    keys = {"system_prompt": system, "chat_template_kwargs": given, "apply_chat_template": True}
    data = opened(folder, tokenizer, **keys)
    assert data.errors([data.check(100)]) == []
    before = [] if system is None else [{"role": "system", "content": system}]
    conversations = [[*before, QUESTION], [*before, QUESTION], [SYSTEM, QUESTION]]
    expected = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **given)
        for messages in conversations
    ]
    assert [prompt.text for prompt in all_of(data)] == expected
    assert [prompt.columns["prompts"] for prompt in all_of(data)] == conversations


@pytest.mark.parametrize(
    ("message", "left_out"),
    [
        ({"role": "developer", "content": "3="}, "content of a message of role 'developer'"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
            "tool_calls of a message of role 'ass",
        ),
        ({"role": "assistant", "content": "3=", "tool_calls": []}, None),
        ({"role": "assistant", "content": "<think>3="}, None),
        ({"role": "user", "content": " 3="}, None),
    ],
)
def test_what_the_template_leaves_out_is_refused_apart_from_thoughts(folder, tokenizer, message, left_out):
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'developer' %}"
        "{% if m.content is none %}{{ m.tool_calls }}{% else %}{{ m.content.split('<think>')[0].strip() }}{% endif %}"
        "{% endfor %}"
    )
    (folder / "train.jsonl").write_text(json.dumps({"prompt": [QUESTION, message, QUESTION], "label": "2"}) + "\n")
    errors = opened(folder, tokenizer).errors([opened(folder, tokenizer).check(100)])
    assert bool(errors) == bool(left_out)
    assert left_out is None or f"the chat template leaves out {left_out}" in errors[0]


@pytest.mark.parametrize("keys", [{"system_prompt": "1="}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_a_text_that_stays_one_is_a_bad_row_where_these_have_no_meaning(folder, tokenizer, keys):
    data = opened(folder, tokenizer, **keys)
    [error] = data.errors([data.check(100)])
    assert f"{folder}/train.jsonl line 1: the prompt is a string, which takes no system prompt, tools or data." in error


def test_an_empty_text_is_no_message(folder, tokenizer):
    (folder / "train.jsonl").write_text('{"prompt": "", "label": "2"}\n')
    data = opened(folder, tokenizer, apply_chat_template=True)
    assert "line 1: the prompt is empty" in data.errors([data.check(100)])[0]


@pytest.mark.parametrize("name", ["enable_thinkin", "tokenize", "enable"])
def test_a_variable_that_the_template_does_not_read_is_refused(folder, tokenizer, name):
    with pytest.raises(
        ConfigError, match=f"data.chat_template_kwargs: the tokenizer's chat template reads no '{name}'"
    ):
        opened(folder, tokenizer, chat_template_kwargs={name: False}, apply_chat_template=True)


def test_plan_prints_it(folder):
    [error] = errors_of(plan_here(folder, "run.yaml", "data.chat_template_kwargs={enable_thinking: false}"))
    assert error == (
        "error: data.chat_template_kwargs: the tokenizer's chat template reads no 'enable_thinking': correct the name, "
        "or drop it"
    )


def test_a_template_for_tools_among_several_is_read(folder, tokenizer):
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "{{ tools[0].name }}: " + TEMPLATE}
    takes = InputSpec((), (), raw_prompts=True, tools=({"name": "add"},))
    file = str(folder / "train.jsonl")
    data = Data(train_files=(file,), max_prompt_length=99, apply_chat_template=True)
    assert all_of(PromptDataset([file], tokenizer, data, 0, takes=takes))[0].text == "add: user: 1+1=\nassistant:"


def test_fields_that_prompts_do_not_read_are_refused_or_counted(folder, tokenizer):
    records = [{"prompt": [QUESTION | {"name": "Bob"}], "label": "2", "system": "Add.", "tools": [{"name": "add"}]}] * 2
    records += [{"prompt": "1+1=", "label": "2", "images": [b"".hex(), "a.png"]}]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = opened(folder, tokenizer)
    parts = [data.check(1000)]
    [error] = data.errors(parts)
    assert "line 3: the field 'images' is not read: only prompts of a model with vision may have images" in error
    warnings = data.warnings(parts)
    assert [
        name
        for name in ("system", "tools", "name")
        for line in warnings
        if "lines 1, 2: " in line and f"'{name}'" in line
    ] == ["system", "tools", "name"]
