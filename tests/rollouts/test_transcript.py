"""The text of a turn that an environment receives."""

from functools import partial

import pytest
from byte_tokenizers import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megappo.config.schema import Data
from megappo.data.chat import Chat
from megappo.data.prompts import Prompt
from megappo.engines.client import Generation
from megappo.rollouts.episodes import Transcript
from megappo.userland.environments import Replacement
from megappo.userland.signatures import PROMPTS

TEMPLATE = (
    "{% for m in messages %}[{{m.role}}]{{m.content}}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tokenizer():
    """A tokenizer of bytes. As in Llama 3, two tokens end a turn, and it names one of them; a third is not special."""
    found = byte_tokenizer("<|eot_id|>", "<|eom_id|>")
    found.add_tokens([AddedToken("</tool_call>", special=False, normalized=False)])
    found.chat_template = TEMPLATE
    return found


@pytest.mark.parametrize(
    ("end", "content", "num_segments"),
    [("<|eot_id|>", "ok", 1), ("<|eom_id|>", "ok", 2), ("</tool_call>", "ok</tool_call>", 1)],
)
def test_special_tokens_that_end_a_turn_are_no_part_of_it(tokenizer, end, content, num_segments):
    """If the template ends a turn with another token than was written, a new segment begins with the template's."""
    chat = Chat(tokenizer, Data(train_files=("f.jsonl",)))
    messages = [{"role": "user", "content": "hi"}]
    text = chat.text_of(messages)
    prompt = Prompt(0, tokenizer.encode(text, add_special_tokens=False), text, None, {PROMPTS: messages})
    conversation = Transcript(prompt, chat, tokenizer, (1000, 2000))
    written = tokenizer.encode(f"ok{end}", add_special_tokens=False)
    assert conversation.write(Generation(written, [-1.0] * len(written), "stop"), 1).content == content
    assert conversation.observe([{"role": "user", "content": "more"}])
    assert (conversation.place.parent is not None) == (num_segments == 1)
    conversation.write(Generation(written, [-1.0] * len(written), "stop"), 2)
    assert len(conversation.segments) == num_segments
    assert conversation.segments[0].tokens[: len(written)] == written
    expected = f"[user]hi<|eot_id|>[assistant]{content}<|eot_id|>[user]more<|eot_id|>[assistant]"
    assert tokenizer.decode(conversation.segments[-1].context) == f"{expected}ok{end}"


@pytest.mark.parametrize("is_chat", [False, True])
def test_an_observation_adds_the_tokens_that_it_has_in_the_whole_text(is_chat):
    """SentencePiece's kind writes a blank before each text that it gets.
    https://github.com/NVIDIA-NeMo/RL/issues/2844"""
    vocab = {token: i for i, token in enumerate(["<unk>", "</s>", "\u2581", *map(chr, range(33, 127)), "\n"])}
    core = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    core.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    blanks = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    blanks.chat_template = TEMPLATE.replace("<|eot_id|>", "</s>\n")
    chat = Chat(blanks, Data(train_files=("f.jsonl",)))
    raw = [{"role": "user", "content": "2+2="}] if is_chat else "2+2="
    text = chat.text_of(raw)
    prompt = Prompt(0, blanks.encode(text, add_special_tokens=False), text, None, {PROMPTS: raw})
    transcript = Transcript(prompt, chat, blanks, (1000, 2000))
    transcript.write(Generation([vocab["4"], vocab["</s>"]], [-1.0] * 2, "stop"), 1)
    assert transcript.observe([{"role": "user", "content": "no!"}])
    assert transcript.place.parent is not None
    assert transcript.place.tokens == blanks.encode(transcript.place.text, add_special_tokens=False)
    assert transcript.place.text.endswith("4</s>\n[user]no!</s>\n[assistant]" if is_chat else "4</s>no!")


def test_an_observation_that_the_tokenizer_joins_with_the_turn_begins_a_segment():
    joins = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])))
    transcript = Transcript(
        Prompt(0, [1], "b", None, {PROMPTS: "b"}), Chat(joins, Data(train_files=("f",))), joins, (9, 9)
    )
    transcript.write(Generation([0], [-1.0], "stop"), 1)
    assert transcript.observe([{"role": "user", "content": "b"}])
    transcript.write(Generation([0], [-1.0], "stop"), 2)
    assert [segment.context for segment in transcript.segments] == [[1, 0], [1, 2, 0]]
    assert [segment.parent for segment in transcript.segments] == [0, 0]


@pytest.mark.parametrize("is_chat", [False, True])
def test_an_observation_may_replace_the_conversation(tokenizer, is_chat):
    """A new segment begins with these messages alone. If they continue what was seen, they are appended."""
    chat = Chat(tokenizer, Data(train_files=("f.jsonl",)))
    raw = [{"role": "user", "content": "hi"}] if is_chat else "hi"
    text = chat.text_of(raw)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    transcript = Transcript(Prompt(0, encode(text), text, None, {PROMPTS: raw}), chat, tokenizer, (1000, 2000))
    written = Generation(encode("ok<|eot_id|>"), [-1.0] * 3, "stop")
    transcript.write(written, 1)
    summary = Replacement([{"role": "user", "content": "Summary: ok"}])
    assert transcript.observe(summary)
    start = "[user]Summary: ok<|eot_id|>[assistant]" if is_chat else "Summary: ok"
    assert transcript.place.text == start
    transcript.write(written, 2)
    again = [*summary, {"role": "assistant", "content": "ok"}] if is_chat else [{"content": f"{start}ok<|eot_id|>"}]
    assert transcript.observe(Replacement([*again, {"role": "user", "content": "more"}]))
    transcript.write(written, 3)
    more = "[user]more<|eot_id|>[assistant]" if is_chat else "more"
    first, second = (tokenizer.decode(segment.context) for segment in transcript.segments)
    assert first == f"{text}ok<|eot_id|>"
    assert second == f"{start}ok<|eot_id|>{more}ok<|eot_id|>"
    assert transcript.segments[1].prompt == encode(start)
