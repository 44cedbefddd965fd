"""Examples of fine-tuning: the columns that files have, the tokens with a loss, and the faults of records."""

import json
import re
from pathlib import Path

import pytest
from character_tokenizer import CHARACTERS, EOS, TALK, TEMPLATE, character_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
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
        ({"messages": [TALK[0], TALK[1] | {"weight": 0}, *TALK[2:]]}, {}, "5." + EOS),
        ({"messages": [*TALK[:3], TALK[3] | {"train": False}]}, {}, "4" + EOS),
        ({"messages": [TALK[0], {"role": "assistant", "content": "end"}]}, {}, "end" + EOS),
        ({"instruction": "Add.", "input": "2+2=", "output": "4"}, {}, "4" + EOS),
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
        (
            {"messages": [TALK[0], {"role": "assistant", "content": " "}]},
            {},
            "a message of the assistant is empty",
        ),
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
        ("{% for m in messages %}{{ '[' + m.role + ']' + ('.' if loop.last and not loop.first else '') + m.content }}"
         "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}",
         "renders an answer differently once messages follow it: set data.train_on=last"),
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
        "will not stop; change the chat template of the tokenizer in model.path so that it writes "
        f"{EOS} after an answer"
    )


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}]}
WITH_TOOLS = (
    "{% if tools %}{{ tools[0].function.name }}: {% endif %}{% for m in messages %}{{ '[' + m.role + ']' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": TALK[:2], "system": "Add."}, f"[system]Add.{EOS}[user]2+2?{EOS}[assistant]4{EOS}"),
        ({"messages": TALK[:2], "tools": TOOLS}, f"add: [user]2+2?{EOS}[assistant]4{EOS}"),
        ({"messages": TALK[:2], "tools": json.dumps(TOOLS)}, f"add: [user]2+2?{EOS}[assistant]4{EOS}"),
        ({"prompt": TALK[:1], "response": "4", "tools": TOOLS}, f"add: [user]2+2?{EOS}[assistant]4{EOS}"),
        (
            {"messages": [TALK[0], CALL | {"content": None, "name": None}]},
            f'[user]2+2?{EOS}[assistant]{{"name": "add", "arguments": {{"a": 2}}}}{EOS}',
        ),
    ],
)
@pytest.mark.parametrize("is_list", [False, True])
def test_fields_beside_messages_are_rendered(tmp_path, tokenizer, record, text, is_list):
    """A tokenizer may have a template of its own for tools."""
    changed = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token=EOS)
    without = WITH_TOOLS.partition("{% endif %}")[2]
    changed.chat_template = {"default": without, "tool_use": WITH_TOOLS} if is_list else WITH_TOOLS
    of = dataset(tmp_path, changed, record)
    [example] = of.at([0])
    assert tokenizer.decode(example.tokens) == text and faults(of) == []


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (
            {"messages": TALK[:2], "tools": TOOLS},
            "the field 'tools' of a record: the tokenizer's chat template lists no",
        ),
        ({"messages": TALK[:2], "tools": "add"}, "expected a text as system and a list as tools, found None and 'add'"),
        ({"messages": [{"role": "system", "content": "B"}, *TALK], "system": "A"}, "'system' is not in the rendered"),
        ({"prompt": "2+2=", "response": "4", "system": "Add."}, "the prompt is a string, which takes no system prompt"),
        (
            {"messages": TALK, "images": ["a.png"]},
            "the field 'images' is not read: only prompts of a model with vision",
        ),
        ({"messages": TALK, "history": [["1", "2"]]}, "the field 'history' is not read: put the earlier turns into"),
        ({"messages": [TALK[0], TALK[1] | {"weight": 0.5}]}, "expected 0 or 1 as weight and train of a message"),
        ({"messages": [TALK[0], TALK[1] | {"reasoning_content": "2 and 2"}]}, "render reasoning_content, or drop it"),
        ({"messages": [TALK[0], CALL | {"content": None}]}, "leaves out tool_calls of a message of role"),
        ({"messages": [TALK[0] | {"content": "\ud800"}, TALK[1]]}, "the field 'messages' is not JSON ('utf-8' codec"),
        ({"messages": [TALK[0], {"role": "assistant", "content": [{"type": "image"}]}]}, "as message 2 of 2: content"),
    ],
)
def test_a_field_that_is_not_read_is_refused(tmp_path, tokenizer, record, fault):
    [error] = faults(dataset(tmp_path, tokenizer, record))
    assert "examples.jsonl line 1: " in error and fault in error


def test_what_no_template_reads_and_end_tokens_in_answers_are_counted(tmp_path, tokenizer):
    answer = {"role": "assistant", "content": f"Write {EOS} here."}
    records = [{"messages": [TALK[0] | {"name": "Bob"}, answer]}] * 2
    of = dataset(tmp_path, tokenizer, *records)
    assert learned(tokenizer, of.at([0])[0]) == f"Write {EOS} here.{EOS}"
    unread, held, inner = sorted(of.warnings([of.check(len(CHARACTERS) + 1)]), key=lambda line: "response" in line)
    assert "lines 1, 2: messages have a field 'name', which the tokenizer's chat template does not read" in unread
    assert f"lines 1, 2: a message holds '{EOS}'" in held and f"lines 1, 2: a response holds '{EOS}'" in inner


def blank_tokenizer(scheme: str) -> PreTrainedTokenizerFast:
    """A tokenizer of characters that writes blanks as SentencePiece does."""
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "\u2581", *CHARACTERS[1:]])}
    core = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    core.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in ("<s>", "</s>")])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    template = TEMPLATE.replace(EOS, "</s>")
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_blanks_of_a_tokenizer_stand_where_they_stand_in_the_whole_text(tmp_path, scheme):
    """https://github.com/NVIDIA-NeMo/RL/issues/2844"""
    blanks = blank_tokenizer(scheme)
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps({"messages": TALK}))
    config = Data.model_validate({"train_files": str(path), "train_batch_size": 1})
    [example] = ExampleDataset([str(path)], blanks, [2], config, seed=0).at([0])
    text = blanks.apply_chat_template(TALK, tokenize=False).rstrip("\n")
    whole = blanks(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = [(text.index(answer), text.index(answer) + len(answer)) for answer in ("4</s>", "5.</s>")]
    expected = [
        int(any(start <= first and last <= stop for start, stop in spans)) for first, last in whole["offset_mapping"]
    ]
    assert (example.tokens, example.mask) == (whole["input_ids"], expected)


@pytest.mark.parametrize("prompt", ["2+2=", "<s>2+2="])
def test_texts_have_one_bos_and_the_end_token_of_the_tokenizer(tmp_path, prompt):
    """https://github.com/huggingface/trl/issues/3853 and https://github.com/modelscope/ms-swift/issues/3113"""
    blanks = blank_tokenizer("never")
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps({"prompt": prompt, "response": "4"}))
    config = Data.model_validate({"train_files": str(path), "train_batch_size": 1})
    other = blanks.convert_tokens_to_ids("!")
    [example] = ExampleDataset([str(path)], blanks, [2, other], config, seed=0).at([0])
    assert blanks.convert_ids_to_tokens(example.tokens) == ["<s>", *"2+2=4", "</s>"]


def test_a_prompt_that_the_tokenizer_joins_with_its_response_is_refused(tmp_path):
    core = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken("</s>", special=True)])
    joins = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    of = dataset(tmp_path, joins, {"prompt": "ba", "response": "b"}, {"prompt": "ab", "response": "b"})
    [error] = of.errors([of.check(4)])
    assert "line 1: one token spans the end of 'ba' and the text that follows it ('bab</s>'), but only one of" in error
