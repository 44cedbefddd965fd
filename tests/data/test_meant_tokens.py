"""Prompts become the tokens that their owner means: as in tokenizer.json, one BOS, no EOS, answers that go on."""

import json
from pathlib import Path

import pytest
from planning import all_of, plan_here, write_run
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from megappo.config.config_error import ConfigError
from megappo.config.schema import Data, Reward
from megappo.data.chat import Chat
from megappo.data.prompts import Prompt, PromptDataset
from megappo.data.tokenizer import load_tokenizer, showing_special
from megappo.engines.client import Generation
from megappo.rollouts.episodes import Transcript
from megappo.userland.signatures import PROMPTS

TEXT = "  answer\n\nin  f(x):\n\treturn \u00e9\u4e2d 12"
BOS, EOS = "<s>", "<|end|>"
SPECIAL = (BOS, EOS, "<think>", "</think>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
RENDERED = f"{BOS}[user]1+1=?{EOS}[assistant]"


def byte_level() -> Tokenizer:
    """As Llama 3's, Qwen's and DeepSeek's kind."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


def sentence_piece() -> Tokenizer:
    """As Llama 2's kind."""
    vocab = {text: i for i, text in enumerate(["\u2581", *(f"<0x{byte:02X}>" for byte in range(256))])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def write_model(folder: Path, core: Tokenizer, *, adds: str = "$A", **config: object) -> Path:
    """Write a model's folder with `config` in its tokenizer_config.json; `adds` is the template around a text."""
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    known = [(text, core.token_to_id(text)) for text in (BOS, EOS)]
    core.post_processor = TemplateProcessing(single=adds, special_tokens=known)
    folder.mkdir(exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(own | config))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def opened(tmp_path: Path, prompts: list[object], reward: Reward | None = None, **data: object) -> PromptDataset:
    """The prompts of `tmp_path`'s model."""
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "label": "1"}) + "\n" for prompt in prompts))
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    section = Data(train_files=(str(file),), **data)
    return PromptDataset([str(file)], tokenizer, section, 0, reward=reward or Reward(function=None))


def found_in(dataset: PromptDataset) -> tuple[list[str], list[str]]:
    """Errors and warnings."""
    parts = [dataset.check(10_000)]
    return dataset.errors(parts), dataset.warnings(parts)


@pytest.mark.parametrize("core", [byte_level, sentence_piece])
@pytest.mark.parametrize(
    "name",
    [
        *("LlamaTokenizerFast", "LlamaTokenizer", "GemmaTokenizerFast", "GPT2TokenizerFast", "Qwen2Tokenizer"),
        *("PreTrainedTokenizerFast", "PreTrainedTokenizer", "GPT2Tokenizer", "GemmaTokenizer"),
    ],
)
def test_a_class_that_builds_itself_otherwise_changes_no_tokens(tmp_path, core, name):
    """LlamaTokenizerFast of a byte-level BPE loses blanks and line ends (DeepSeek's and R1-Distill-Llama's folders).
    https://github.com/huggingface/transformers/issues/45488"""
    folder = write_model(tmp_path / "model", core(), adds=f"{BOS} $A", tokenizer_class=name, add_bos_token=True)
    tokenizer, alone = load_tokenizer(str(folder)), Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == alone.encode(TEXT).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert len(tokenizer) == alone.get_vocab_size(with_added_tokens=True)
    [prompt] = all_of(opened(tmp_path, [TEXT]))
    assert prompt.tokens == ids


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"split_special_tokens": True}, f"1 {BOS} 2"),
        ({"added_tokens_decoder": {"900": {"content": "<extra>", "special": True}}}, "1 <extra> 2"),
        ({"additional_special_tokens": ["answer"]}, "an answer"),
        ({"added_tokens_decoder": {"256": {"content": BOS, "special": True, "lstrip": True}}}, f" {BOS}1"),
        ({"added_tokens_decoder": {"256": {"content": BOS, "special": True, "rstrip": True}}}, f"1{BOS} "),
    ],
)
def test_tokens_that_the_two_files_make_otherwise_are_an_error(tmp_path, config, text):
    write_model(tmp_path / "model", byte_level(), **config)
    errors, _ = found_in(opened(tmp_path, ["1 2", text]))
    [error] = [error for error in errors if "other tokens" in error]
    assert "d.jsonl line 2: the prompt has other tokens by tokenizer.json alone" in error


def test_a_limit_of_length_in_tokenizer_json_is_none_of_prompts(tmp_path):
    core = byte_level()
    core.enable_truncation(4)
    core.enable_padding(length=64)
    write_model(tmp_path / "model", core)
    dataset = opened(tmp_path, ["1 + 2 + 3 ="])
    assert found_in(dataset) == ([], [])
    assert len(all_of(dataset)[0].tokens) == len("1 + 2 + 3 =")


@pytest.mark.parametrize("prompt", [RENDERED, RENDERED.removeprefix(BOS), [{"role": "user", "content": "1+1=?"}]])
def test_a_prompt_that_a_template_has_made_before_has_one_bos(tmp_path, prompt):
    write_model(tmp_path / "model", byte_level(), adds=f"{BOS} $A")
    dataset = opened(tmp_path, [prompt])
    assert found_in(dataset) == ([], [])
    [found] = all_of(dataset)
    assert dataset._tokenizer.decode(found.tokens) == RENDERED


@pytest.mark.parametrize(
    ("adds", "template", "prompt"),
    [
        (f"$A {EOS}", TEMPLATE, "1+1="),
        ("$A", TEMPLATE, f"1+1={EOS}"),
        ("$A", TEMPLATE.partition("{% if")[0], [{"role": "user", "content": "1+1="}]),
    ],
    ids=["post-processor", "text", "template"],
)
def test_an_end_of_text_before_the_answer_is_warned_of(tmp_path, adds, template, prompt):
    write_model(tmp_path / "model", byte_level(), adds=adds, chat_template=template)
    errors, [warning] = found_in(opened(tmp_path, [prompt] * 5))
    assert errors == []
    assert f"lines 1, 2, 3 and 2 more: the prompt ends with '{EOS}', after which a model expects no text" in warning


@pytest.mark.parametrize(
    ("prompt", "keys", "special"),
    [
        (RENDERED, {"apply_chat_template": True}, [BOS, EOS]),
        (f"[user]1+1={EOS}", {"apply_chat_template": True}, [EOS]),
        ([{"role": "system", "content": f"{BOS}Be brief."}, {"role": "user", "content": "1+1="}], {}, [BOS]),
    ],
)
def test_a_text_that_is_put_through_a_template_twice_is_warned_of(tmp_path, prompt, keys, special):
    write_model(tmp_path / "model", byte_level())
    errors, warnings = found_in(opened(tmp_path, [prompt], **keys))
    assert errors == [] and len(warnings) == len(special)
    for token in special:
        assert any(f"d.jsonl line 1: a message holds '{token}', so a chat template may" in line for line in warnings)


MESSAGES = [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize("prompt", [json.dumps(MESSAGES), str(MESSAGES), json.dumps(MESSAGES[0], indent=1)])
@pytest.mark.parametrize("apply", [False, True])
def test_messages_that_are_a_text_are_a_bad_row(tmp_path, prompt, apply):
    write_model(tmp_path / "model", byte_level())
    other = str([{"role": "user", "content": "2+2="}])
    [error], _ = found_in(opened(tmp_path, [MESSAGES, prompt, other], apply_chat_template=apply))
    assert "d.jsonl lines 2, 3: the prompt is a text that holds chat messages: " in error
    assert "(data.on_bad_row=skip leaves such out)" in error


def test_a_text_that_is_only_like_messages_is_one(tmp_path):
    write_model(tmp_path / "model", byte_level())
    prompts = ['[{"a": 1}]', "{role: user}", "[user]", [{"role": "user", "content": json.dumps(MESSAGES)}]]
    assert found_in(opened(tmp_path, prompts)) == ([], [])


@pytest.mark.parametrize("begun", ["Let me think: ", "<think>\n", "", "12", f"a{chr(0x4E2D)}"])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_an_answer_that_a_prompt_begins_goes_on(tmp_path, begun, system):
    write_model(tmp_path / "model", byte_level())
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": begun}]
    dataset = opened(tmp_path, [messages], system_prompt=system)
    assert found_in(dataset)[0] == []
    before = "" if system is None else f"[system]{system}{EOS}"
    [prompt] = all_of(dataset)
    assert prompt.text == f"{BOS}{before}[user]1+1={EOS}[assistant]{begun}"
    assert dataset._tokenizer.decode(prompt.tokens) == prompt.text


def test_a_template_that_changes_the_answer_that_is_begun_refuses_it(tmp_path):
    """A template that drops earlier thoughts may do so."""
    template = TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]")
    write_model(tmp_path / "model", byte_level(), chat_template=template)
    [error], _ = found_in(opened(tmp_path, [[*MESSAGES, {"role": "assistant", "content": "<think>1</think>2"}]]))
    assert "d.jsonl line 1: the chat template refuses the messages: ValueError: continue_final_message" in error


def test_an_episode_goes_on_with_the_answer_that_its_prompt_begins(tmp_path):
    """Its first turn and that are one message; without an observation, a further message follows."""
    write_model(tmp_path / "model", byte_level())
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    chat = Chat(tokenizer, Data(train_files=("f.jsonl",)))
    raw = [*MESSAGES, {"role": "assistant", "content": "It is "}]
    text = chat.text_of(raw)
    prompt = Prompt(0, tokenizer.encode(text, add_special_tokens=False), text, None, {PROMPTS: raw})
    conversation = Transcript(prompt, chat, tokenizer, (1000, 2000))
    written = tokenizer.encode(f"2{EOS}", add_special_tokens=False)
    generation = Generation(written, [-1.0] * len(written), "stop")
    assert conversation.observe([]) and conversation.write(generation, 1).content == "2"
    assert conversation.observe([{"role": "user", "content": "Sure?"}])
    assert conversation.write(generation, 2).content == "2"
    assert conversation.observe([])
    [_] = conversation.segments
    expected = f"{text}2{EOS}[user]Sure?{EOS}[assistant]2{EOS}[assistant]"
    assert tokenizer.decode(conversation.place.tokens) == conversation.place.text == expected
    assert raw[-1] == {"role": "assistant", "content": "It is "}


TAGS = "<think>one</think> two"


@pytest.mark.parametrize("end", ["", EOS, f"{EOS}{BOS}", "<|eom|>"])
def test_a_reward_function_may_see_special_tokens_but_for_those_that_begin_or_end_a_text(tmp_path, end):
    core = byte_level()
    core.add_special_tokens(["<|eom|>"])  # an end by generation_config.json alone, as Llama 3's
    folder = write_model(tmp_path / "model", core)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [core.token_to_id("<|eom|>")]}))
    tokenizer = load_tokenizer(str(folder))
    tokens = tokenizer(TAGS + end)["input_ids"]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "one two"
    shown = showing_special(tokenizer)
    assert shown.decode(tokens, skip_special_tokens=True) == TAGS
    assert shown(TAGS + end)["input_ids"] == tokens
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "one two", "the one that was given is as it was"


OF_USER = "def f(responses): return [float('<think>' in one) for one in responses]\n"


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize(
    ("function", "named"), [("think_answer", "</think>, <think>"), ("FILE:f", "<think>"), ("exact_match", "")]
)
def test_special_tokens_that_a_reward_function_never_sees_are_warned_of(tmp_path, function, named, skips):
    write_model(tmp_path / "model", byte_level())
    (tmp_path / "own.py").write_text(OF_USER)
    function = function.replace("FILE", str(tmp_path / "own.py"))
    reward = Reward(function={function: 1.0, "gsm8k": 1.0}, skip_special_tokens=skips)
    _, warnings = found_in(opened(tmp_path, ["1+1="], reward))
    assert len(warnings) == (skips and bool(named))
    assert all(f"{function} gets responses without special tokens, but" in one for one in warnings)
    assert all(f"names {named}: " in one for one in warnings)
    assert all("set reward.skip_special_tokens=false" in one for one in warnings)


def test_plan_prints_it(tmp_path):
    write_run(tmp_path)
    own = json.loads((tmp_path / "model" / "config.json").read_text())
    write_model(tmp_path / "model", byte_level(), adds=f"$A {EOS}")
    (tmp_path / "model" / "config.json").write_text(json.dumps(own | {"vocab_size": 300}))
    done = plan_here(tmp_path, "run.yaml", "reward.function=think_answer")
    assert done.returncode == 0
    assert "warning: data.train_files: think_answer gets responses without special tokens" in done.stderr
    assert (
        f"warning: data.train_files: train.jsonl lines 1, 2, 3 and 97 more: the prompt ends with '{EOS}'" in done.stderr
    )


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "Qwen2Tokenizer"])
def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path, name):
    folder = write_model(tmp_path / "model", byte_level(), tokenizer_class=name)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json, nor another file with a vocabulary\): complete the"):
        load_tokenizer(str(folder))
