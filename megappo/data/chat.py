"""Prompts as the model sees them: texts unchanged, chat messages read and rendered by the tokenizer's template."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from megappo.config.config_error import ConfigError
from megappo.config.schema import Data
from megappo.userland.signatures import is_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]]
PromptContent = str | list[dict[str, Any]]
"""A text, or messages."""
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
OWN_FIELDS = ("role", "content", "tool_call_id", "weight", "train")
"""Fields of messages that are read beside the template, or that link a result to its call."""
NO_TOOLS = "the tokenizer's chat template lists no tools: use one that does"
MESSAGES_AS_TEXT = re.compile(r"""\s*\[?\s*\{\s*['"](role|content)['"]\s*:""")
"""Beginning of chat messages that were written into a text, as JSON or by Python's repr."""


class Chat:
    """Renders prompts as text.

    Args:
        config: apply_chat_template, system_prompt, chat_template_kwargs.
        tools: JSON schemas of the functions that the template lists.
        reads_images: messages may have parts of text and images.
    Raises:
        ConfigError: the template does not read one of these.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", config: Data, tools: Tools = (), *, reads_images: bool = False
    ):
        self._reads_images = reads_images
        self._tokenizer = tokenizer
        self._config = config
        self._tools = list(tools) or None
        template = str(tokenizer.chat_template or "")  # several templates: each of them
        if tools and "tools" not in template:
            keys = "rollout.tools, eval.datasets.NAME.tools, or the field 'tools' of a record"
            raise ConfigError(f"{keys}: {NO_TOOLS}")
        self._needs_messages = config.system_prompt is not None or bool(config.chat_template_kwargs or tools)
        for name in config.chat_template_kwargs:
            if not _reads(template, name):
                raise ConfigError(
                    f"data.chat_template_kwargs: the tokenizer's chat template reads no {name!r}: correct the name, or "
                    "drop it"
                )

    def content_of(self, prompt: Any) -> PromptContent:
        """Return a file's prompt as a text that goes to the model unchanged, or messages with the system prompt.

        Raises:
            ValueError: it is neither, or a text where there must be messages.
        """
        if prompt == "":
            raise ValueError("the prompt is empty")
        if isinstance(prompt, str) and MESSAGES_AS_TEXT.match(prompt):
            raise ValueError(
                "the prompt is a text that holds chat messages: write the list itself (json.loads), or put the text "
                "into a message, [{'role': 'user', 'content': text}]"
            )
        if isinstance(prompt, str):
            if self._config.apply_chat_template:
                return self.with_system([{"role": "user", "content": prompt}])
            if self._needs_messages:
                raise ValueError(
                    "the prompt is a string, which takes no system prompt, tools or data.chat_template_kwargs: set "
                    "data.apply_chat_template=true, or drop them"
                )
            return prompt
        return self.with_system(read_messages(prompt, "a string or ", reads_images=self._reads_images))

    def text_of(self, content: PromptContent, tools: Tools | None = None, *, continues: bool = True) -> str:
        """Render a prompt as the model sees it, up to where its answer begins.

        Args:
            tools: see `whole_text`.
            continues: continue a last message of the assistant instead of starting a new one.
        Raises:
            ValueError: the template refuses the messages, or renders an empty text.
        """
        if isinstance(content, str):
            text = content
        else:
            continues = continues and content[-1]["role"] == "assistant"
            text = self.whole_text(
                content, tools, continue_final_message=continues, add_generation_prompt=not continues
            )
        if not text:
            raise ValueError("the prompt is empty")
        return text

    def with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with data.system_prompt, unless they have a system message."""
        system = self._config.system_prompt
        if system is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": system}, *messages]

    def unread_fields(self, content: PromptContent) -> Iterator[str]:
        """Yield a warning for each field of messages that the template does not read."""
        names = [name for message in content for name in message] if isinstance(content, list) else []
        for name in dict.fromkeys(names):
            if name not in OWN_FIELDS and not _reads(str(self._tokenizer.chat_template), name):
                yield f"messages have a field {name!r}, which the tokenizer's chat template does not read: drop it"

    def whole_text(self, messages: list[dict[str, Any]], tools: Tools | None = None, **settings: bool) -> str:
        """Render a conversation up to the end of its last message, or with settings of the template.

        Args:
            tools: JSON schemas of the functions that the template lists; None: the constructor's.
        Raises:
            ValueError: the template refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise ValueError(
                "the prompt is chat messages but the tokenizer has no chat template: use strings, or add one, "
                "chat_template.jinja in the model's folder"
            )
        if tools and "tools" not in str(self._tokenizer.chat_template):
            raise ValueError(NO_TOOLS)
        listed = self._tools if tools is None else list(tools) or None
        given = self._config.chat_template_kwargs | settings
        render = partial(self._tokenizer.apply_chat_template, tools=listed, tokenize=False, **given)
        try:
            text: str = render(messages)
            text.encode()  # raises for a lone surrogate
        except Exception as error:  # templates refuse messages with jinja2's own exceptions
            raise ValueError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error
        for message in messages:
            field = "tool_calls" if message["role"] == "assistant" else "content"  # thoughts are dropped on purpose
            if str(message.get(field) or "").strip() in text:
                continue
            without, other = [one | {field: ""} if one is message else one for one in messages], ""
            with suppress(Exception):  # the template refuses the message without the field, so it reads the field
                other = render(without)
            if other == text:
                raise ValueError(
                    f"the chat template leaves out {field} of a message of role {message['role']!r}: use another role "
                    "or form, or a chat_template.jinja that reads it"
                )
        return text


def read_messages(value: Any, alternative: str = "", *, reads_images: bool = False) -> list[dict[str, Any]]:
    """Return a conversation as messages for a template.

    As SGLang passes them, null content is empty and arguments of tool calls are objects. Other null fields, which
    parquet adds, are dropped. ShareGPT's messages have `from` and `value`.

    Args:
        alternative: what else is expected, for messages.
        reads_images: content may be a list of parts.
    Raises:
        ValueError: it is none.
    """
    expected = f"expected {alternative}a list of {{'role': str, 'content': str}}, found"
    if not (isinstance(value, list) and value):
        raise ValueError(f"{expected} {repr(value)[:80]}")
    messages = []
    for number, one in enumerate(value, 1):
        if isinstance(one, dict) and (role := SHAREGPT_ROLES.get(str(one.get("from")))):
            one = {**one, "role": role, "content": one.get("value"), "from": None, "value": None}
        has_parts = reads_images and isinstance(one, dict) and isinstance(one.get("content"), list)
        if not is_message({**one, "content": ""} if has_parts else one):
            remedy = "content may be null beside tool_calls, and a list only for a model with vision"
            raise ValueError(f"{expected} {one!r:.80} as message {number} of {len(value)}: {remedy}")
        messages.append(
            {name: part for name, part in one.items() if part is not None} | {"content": one["content"] or ""}
        )
        if calls := one.get("tool_calls"):
            messages[-1]["tool_calls"] = list(map(_with_object, calls))
    return messages


def _with_object(call: Any) -> Any:
    """Return a call of a tool with its arguments as an object, if they are JSON in a text."""
    with suppress(TypeError, KeyError, ValueError):
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    return call


def chat_end_warnings(
    tokenizer: "PreTrainedTokenizerBase", ends: Collection[int], *, is_learned: bool = False
) -> list[str]:
    """Return a warning if no token of `ends` ends an assistant's message in the chat template: a model that ends its
    messages as the template does would write on.

    Args:
        is_learned: the model is trained on messages as the template renders them.
    """
    if not tokenizer.chat_template:
        return []
    answer = "An answer"
    messages = [{"role": "user", "content": "A question"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # several templates without a default, or one that refuses such messages
        return []
    tail = tokenizer.encode(text.rpartition(answer)[2], add_special_tokens=False)
    if set(tail) & set(ends) or not (tail or is_learned):
        return []
    written = tokenizer.decode(tail[:1])
    known = " or ".join(tokenizer.convert_ids_to_tokens(list(ends)))
    ending = f"ends a message with {written!r}" if tail else "writes nothing after an answer"
    remedy = f"if prompts are chat messages, set rollout.stop=[{written!r}]"
    if is_learned:
        remedy = f"change the chat template of the tokenizer in model.path so that it writes {known} after an answer"
    return [
        f"the chat template {ending}, and responses end with {known}: a model that writes chat messages will not stop; "
        f"{remedy}"
    ]


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None
