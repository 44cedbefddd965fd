"""Chat templates of public models, in TRL's copies: which turns are appended, and which begin a new prompt."""

from functools import partial

import pytest
from byte_tokenizers import byte_tokenizer
from real_tokenizers import pypi_folder

from megappo.config.schema import Data
from megappo.data.chat import Chat
from megappo.engines.generations import Generation
from megappo.rollouts.conversation import TurnTree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}, "digits": {"type": "integer"}},
    "required": ["expression"],
}
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "Multiply.", "parameters": PARAMETERS}}]
OWN, DUMPED = '{"expression":"12*34","digits": 2}', '{"expression": "12*34", "digits": 2}'
"""Arguments as a model spaces them, and as json.dumps does."""
HERMES = 'I call.\n<tool_call>\n{"name": "calculator", "arguments": %s}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
CODER = (
    "hm\n</think>\n\nI call.\n\n<tool_call>\n<function=calculator>\n<parameter=expression>\n12*34\n</parameter>\n"
    "<parameter=digits>\n2\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "\n<think>hm</think>\nI call.\n<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>12*34</arg_value>\n"
    "</tool_call>"
)
BEGIN, SEP, END = (
    "<\uff5ctool\u2581call%s\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call%s\u2581end\uff5c>",
)
DEEPSEEK = (
    f"I call.{BEGIN % 's'}{BEGIN % ''}function{SEP}calculator\n```json\n".replace("%", "%%")
    + f"%s\n```{END % ''}{END % 's'}"
)
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"
CASES = {
    # template: end after a call, end after an answer, turn with a call, answer, which turns are appended
    "qwen2_5": ("<|im_end|>", "<|im_end|>", HERMES, "answer", "yyyy"),
    "qwen3_instruct_2507": ("<|im_end|>", "<|im_end|>", HERMES, "answer", "yyyy"),
    "lfm2": (
        *("<|im_end|>", "<|im_end|>", "I call.<|tool_call_start|>[calculator(%s)]<|tool_call_end|>", "answer", "yyyy"),
    ),
    "llama3_1": ("<|eot_id|>", "<|eot_id|>", '{"name": "calculator", "parameters": %s}', "answer", "yyyy"),
    "qwen3": ("<|im_end|>", "<|im_end|>", THOUGHT + HERMES, f"{THOUGHT}answer", "yyny"),
    "qwen3_5_think": ("<|im_end|>", "<|im_end|>", CODER, "hm\n</think>\n\nanswer", "yyny"),
    "qwen3_6": ("<|im_end|>", "<|im_end|>", CODER, "hm\n</think>\n\nanswer", "yyny"),
    "nemotron_3_nano": ("<|im_end|>", "<|im_end|>", f"{CODER}\n", "hm\n</think>\nanswer", "yyny"),
    "nemotron_3_super": ("<|im_end|>", "<|im_end|>", CODER, "hm\n</think>\nanswer", "yyny"),
    "glm4moe": ("<|observation|>", "<|user|>", GLM, "\n<think>hm</think>\nanswer", "yyny"),
    "deepseekv3": (EOS, EOS, DEEPSEEK, "answer", "yyyy"),
    "gptoss": (
        "<|call|>",
        "<|return|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.calculator<|channel|>commentary json"
        "<|message|>%s",
        "<|channel|>final<|message|>answer",
        "yyny",
    ),
}


@pytest.mark.parametrize("arguments", [OWN, DUMPED], ids=["own", "dumped"])
@pytest.mark.parametrize("parses", [False, True], ids=["environment", "agent"])
@pytest.mark.parametrize("name", CASES)
def test_turns_are_appended_unless_the_template_drops_thoughts(name, parses, arguments):
    """Call, call, answer, call, answer: the user writes after an answer, and templates then drop earlier thoughts.

    An environment has the turns as they were sampled; an agent replays them parsed, without thoughts. Each prompt is
    the rendering by transformers of the turns as sampled, or the tokens of the turn before with what follows it.
    GPT-OSS's template refuses turns as sampled, so only an agent has more than one.
    """
    end_of_call, end_of_answer, call, answer, expected = CASES[name]
    tokenizer = byte_tokenizer(end_of_call, end_of_answer)
    tokenizer.bos_token = "<s>"
    folder = pypi_folder("trl==1.16.0", "trl/chat_templates/")
    tokenizer.chat_template = (folder / f"{name}.jinja").read_text("utf-8")
    tools = TOOLS if "tools" in tokenizer.chat_template else []
    encode = partial(tokenizer.encode, add_special_tokens=False)
    tree = TurnTree(Chat(tokenizer, Data(train_files=("f.jsonl",)), tools), tokenizer)
    messages, turns, found = [{"role": "user", "content": "12*34="}], [None], ""
    sampled = list(messages)
    place = tree.place(messages, turns)
    for number, is_call in enumerate((True, True, False, True), start=1):
        text = call.replace("%s", arguments) if is_call else answer
        end = end_of_call if is_call else end_of_answer
        tokens = encode(text + end)
        turns += [tree.write(place, Generation(tokens, [-1.0] * len(tokens), "stop"), number), None]
        seen = f"{place.text}{text}{end}"
        message = {"role": "assistant", "content": text}
        if parses:
            function = {"name": "calculator", "arguments": {"expression": "12*34", "digits": 2}}
            called = {"tool_calls": [{"id": "call00001", "type": "function", "function": function}]}
            message = {"role": "assistant", "content": "", **called} if is_call else message | {"content": "answer"}
        new = {"role": "tool", "content": "408", "tool_call_id": "call00001"} if is_call else messages[0]
        opening = "<think>\n" if place.text.endswith("<think>\n") else ""
        messages += [message, new]
        sampled += [{"role": "assistant", "content": opening + text}, new]
        if name == "gptoss" and not parses:
            with pytest.raises(ValueError, match="refuses the messages: .*containing <.channel.> tags"):
                tree.place(messages, turns)
            return
        before, place = place, tree.place(messages, turns)
        found += "n" if place.parent is None else "y"
        if place.parent is not None:
            assert place.tokens[: len(before.tokens) + len(tokens)] == before.tokens + tokens
            assert place.text.startswith(seen)
        else:
            settings = {"tools": tools or None, "tokenize": False, "add_generation_prompt": True}
            shown = messages if name == "gptoss" else sampled
            assert place.text == tokenizer.apply_chat_template(shown, **settings)
    assert found == expected
