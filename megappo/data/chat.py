"""Prompts as the model sees them: texts unchanged, chat messages rendered by the tokenizer's template."""

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from megappo.config.config_error import ConfigError
from megappo.config.schema import Data
from megappo.userland.signatures import is_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]]
PromptContent = str | list[dict[str, Any]]
"""A text, or messages."""
MESSAGES_AS_TEXT = re.compile(r"""\s*\[?\s*\{\s*['"](role|content)['"]\s*:""")
"""Beginning of chat messages that were written into a text, as JSON or by Python's repr."""


class Chat:
    """Renders prompts as text.

    Args:
        config: apply_chat_template, system_prompt, chat_template_kwargs.
        tools: JSON schemas of the functions that the template lists.
    Raises:
        ConfigError: the template does not read one of these.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", config: Data, tools: Tools = ()):
        self._tokenizer = tokenizer
        self._config = config
        self._tools = list(tools) or None
        is_read = bool(tokenizer.chat_template and (tools or config.chat_template_kwargs))
        template = tokenizer.get_chat_template() if is_read else ""  # raises if several have no default
        if tools and "tools" not in template:
            keys = "rollout.tools, or eval.datasets.NAME.tools"
            raise ConfigError(f"{keys}: the tokenizer's chat template lists no tools: use one that does")
        self._needs_messages = config.system_prompt is not None or bool(config.chat_template_kwargs)
        _refuse_unread(template, config.chat_template_kwargs)

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
                    "the prompt is a string, for which data.system_prompt and data.chat_template_kwargs have no "
                    "meaning: set data.apply_chat_template, or drop them"
                )
            return prompt
        if not (isinstance(prompt, list) and prompt and all(map(is_message, prompt))):
            raise ValueError(
                f"expected a string or a list of {{'role': str, 'content': str}}, found {repr(prompt)[:80]}"
            )
        return self.with_system(prompt)

    def text_of(self, content: PromptContent, *, continues: bool = True) -> str:
        """Render a prompt as the model sees it, up to where its answer begins.

        Args:
            continues: continue a last message of the assistant instead of starting a new one.
        Raises:
            ValueError: the template refuses the messages, or renders an empty text.
        """
        if isinstance(content, str):
            text = content
        else:
            continues = continues and content[-1]["role"] == "assistant"
            text = self._rendered(content, continue_final_message=continues, add_generation_prompt=not continues)
        if not text:
            raise ValueError("the prompt is empty")
        return text

    def with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with data.system_prompt, unless they have a system message."""
        system = self._config.system_prompt
        if system is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": system}, *messages]

    def whole_text(self, messages: list[dict[str, Any]]) -> str:
        """Render a conversation up to the end of its last message.

        Raises:
            ValueError: the template refuses the messages.
        """
        return self._rendered(messages)

    def _rendered(self, messages: list[dict[str, Any]], **settings: bool) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError(
                "the prompt is chat messages but the tokenizer has no chat template: use strings, or add one, "
                "chat_template.jinja in the model's folder"
            )
        given = self._config.chat_template_kwargs | settings
        try:
            return self._tokenizer.apply_chat_template(messages, tools=self._tools, tokenize=False, **given)
        except Exception as error:  # templates refuse messages with jinja2's own exceptions
            raise ValueError(f"the chat template refuses the messages: {type(error).__name__}: {error}") from error


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
    written, known = tokenizer.decode(tail[:1]), " or ".join(tokenizer.convert_ids_to_tokens(list(ends)))
    ending = f"ends a message with {written!r}" if tail else "writes nothing after an answer"
    remedy = f"if prompts are chat messages, set rollout.stop=[{written!r}]"
    if is_learned:
        remedy = f"have the template of the tokenizer in model.path write {known} after an answer"
    return [
        f"the chat template {ending}, and responses end with {known}: a model that writes chat messages will not stop; "
        f"{remedy}"
    ]


def _refuse_unread(template: str, given: dict[str, Any]) -> None:
    """Raise ConfigError for a variable that the template does not know: it would have no effect, without an error."""
    for name in given:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(
                f"data.chat_template_kwargs: the tokenizer's chat template reads no {name!r}: correct the name, or "
                "drop it"
            )
