"""Examples that a model is fine-tuned on: conversations as tokens, with a loss on the messages of the assistant."""

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from megappo.config.config_error import ConfigError
from megappo.config.schema import Data
from megappo.data.chat import Chat, PromptContent, chat_end_warnings, read_messages
from megappo.data.entries import HISTORY, MEDIA, check_value, refuse_fields, required_values
from megappo.data.prompt_checks import Check
from megappo.data.record_dataset import RecordDataset
from megappo.data.records import Records, Unpack
from megappo.data.tokenizer import RenderedText, added_tokens, encode, with_context

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS: Sequence[Mapping[str, str]] = (
    {"messages": "messages"},
    {"messages": "conversations"},
    {"prompt": "prompt", "response": "response"},
    {"prompt": "prompt", "response": "completion"},
    {"prompt": "question", "response": "answer"},
    {"prompt": "instruction", "response": "output"},
)
"""Part of an example -> the field of a file that holds it; the first form whose fields a file has is taken."""
E = TypeVar("E")
EQUAL = "chosen and rejected are equal, a tie, from which no order is learned"


@dataclass(frozen=True)
class Example:
    """Tokens of a conversation.

    Attributes:
        index: position in the dataset (files in order, lines in order), from 0.
        tokens: tokens up to the last one with a loss.
        mask: for each token, 1 if it has a loss, else 0. The first one has none.
        fields: fields of its row beside its mask: a number, or a list with a number for each token.
    """

    index: int
    tokens: list[int]
    mask: list[int]
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> Sequence["Example"]:
        """Its rows: itself."""
        return (self,)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one with a loss."""
        return self.mask.index(1)


Encoded = tuple[list[int], list[int]]
"""Tokens of a conversation, and for each of them 1 if it has a loss, else 0."""


class ExampleText(NamedTuple):
    """A conversation as the model sees it, up to the end of its last part with a loss.

    Attributes:
        parts: parts of the text, alternately without and with a loss.
        content: the text or messages that it was made from.
        ends: for each part with a loss, the number of the record's messages up to its end.
        outcome: what the record holds besides, see `scored_examples.Outcome`; or the margin of a pair.
    """

    parts: Sequence[str]
    content: PromptContent
    ends: Sequence[int] = ()
    outcome: Any = None

    @property
    def rendered(self) -> RenderedText:
        """The whole text."""
        return RenderedText("".join(self.parts), is_chat=not isinstance(self.content, str))


class ConversationDataset(RecordDataset[E]):
    """Records of one or several conversations each; arguments as of `RecordDataset`.

    Args:
        ends: tokens that end a response.
    Attributes:
        forms: known forms of files; hint: a value of data.columns.
        fields: fields of the rows beside their mask.
        media_tokens: tokens that stand for images and videos, which are not read.
    Raises:
        ConfigError: a file has no known form; the chat template does not read its arguments.
    """

    forms: ClassVar[Sequence[Mapping[str, str]]]
    hint: ClassVar[str]
    fields: ClassVar[Sequence[str]] = ()
    media_tokens: Sequence[int] = ()

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        ends: Sequence[int],
        config: Data,
        seed: int,
        key: str = "data.train_files",
        unpack: Unpack | None = None,
        weights: Sequence[float] = (),
    ):
        self._ends = ends
        self._endings = tuple(tokenizer.decode([end]) for end in ends)
        self._ending = tokenizer.eos_token or self._endings[0]
        self._chat = Chat(tokenizer, config)
        super().__init__(files, tokenizer, config, seed, key, None, unpack, weights)
        self._forms = {file.path: self._form(file) for file in self.files}

    def _form(self, file: Records) -> Mapping[str, str]:
        if self.config.columns:
            return {str(part): name for part, name in self.config.columns.items()}
        known = (form for form in self.forms if set(form.values()) <= set(file.fields))
        if (form := next(known, None)) is not None:
            return form
        if not file.fields:  # its lines have faults that a check finds
            return self.forms[0]
        expected = "; ".join(" and ".join(form.values()) for form in self.forms)
        raise ConfigError(
            f"{self._key}: {file.path} has the fields {', '.join(file.fields)}; expected one of: {expected}. Name its "
            f"fields in data.columns, such as {self.hint}"
        )

    def at(self, indices: Sequence[int]) -> list[E]:
        """Return the entries at these positions in the dataset, which must have no fault."""
        records = []
        files = []
        for index in indices:
            records.append(self._record(index))
            file, _ = self._located(index)
            files.append(file)
        texts = list(map(self._texts_of, records, files))
        encoded = map(list, self._encoded(texts))
        return list(map(self._entry, indices, texts, encoded))

    def _texts_of(self, record: Any, file: Records) -> list[ExampleText]:
        """Return the conversations of a record.

        Raises:
            ValueError: it has none, or has a field that is not read.
        """
        form = self._forms[file.path]
        values = required_values(record, dict.fromkeys(form.values(), "data.columns"))
        system: Any = None if "system" in values else record.get("system")
        tools: Any = None if "tools" in values else record.get("tools")
        for name, value in values.items():
            check_value(f"field {name!r}", value)
        refuse_fields(record, MEDIA | HISTORY, values)
        if form.get("prompt") == "instruction" and record.get("input"):  # Alpaca's
            values["instruction"] = f"{values['instruction']}\n{record['input']}"
        with suppress(TypeError, ValueError):  # no text, or a text that is no JSON
            tools = json.loads(tools)
        tools = tools or []
        if not (isinstance(system or "", str) and isinstance(tools, list)):
            raise ValueError(f"expected a text as system and a list as tools, found {system!r:.40} and {tools!r:.40}")
        chat = self._chat
        if system or tools:
            chat = Chat(
                self._tokenizer,
                self.config.model_copy(update={"system_prompt": system or self.config.system_prompt}),
                tools,
            )
        texts = self._texts(chat, {part: values[name] for part, name in form.items()})
        if any((system or "").strip() not in text.rendered.text for text in texts):
            raise ValueError("the field 'system' is not in the rendered text: drop the system message, or the field")
        return texts

    @abstractmethod
    def _texts(self, chat: Chat, parts: Mapping[str, Any]) -> list[ExampleText]:
        """Return the conversations of a record, by the parts of its form.

        Raises:
            ValueError: it has none.
        """

    @abstractmethod
    def _entry(self, index: int, texts: Sequence[ExampleText], encoded: Sequence[Encoded]) -> E:
        """Return the entry of a record, of whose conversations these are the texts and the tokens.

        Raises:
            ValueError: it has none.
        """

    @abstractmethod
    def _to_encode(self, text: ExampleText) -> list[RenderedText]:
        """Return the texts whose tokens `_joined` joins into the conversation's tokens."""

    @abstractmethod
    def _joined(self, tokens: Sequence[list[int]]) -> Encoded:
        """Return the tokens of a conversation, up to the last one with a loss, and their mask.

        Raises:
            ValueError: a token belongs to two parts of the text.
        """

    def _encoded(self, records: Sequence[Sequence[ExampleText]]) -> Iterator[Iterator[Encoded]]:
        """Yield for each record the tokens of its conversations and their masks, which raise as `_joined` does."""
        given = [[self._to_encode(text) for text in texts] for texts in records]
        tokens = iter(encode([one for of_record in given for texts in of_record for one in texts], self._tokenizer))
        for of_record in given:
            yield map(self._joined, [[next(tokens) for _ in texts] for texts in of_record])

    def _read(self, record: Any, file: Records) -> tuple[list[ExampleText], Iterable[str]]:
        texts = self._texts_of(record, file)
        warnings = (warning for text in texts for warning in self._chat.unread_fields(text.content))
        return texts, dict.fromkeys(warnings)

    def _check_entries(
        self,
        check: Check,
        entries: Mapping[int, list[ExampleText]],
        numbers: Sequence[int],
        vocab_size: int,
    ) -> None:
        every = self._encoded(list(entries.values()))
        for (number, texts), of_record in zip(entries.items(), every, strict=True):
            try:
                encoded = list(of_record)
                self._entry(number, texts, encoded)
            except ValueError as error:
                self._note_bad_row(check, number, error.args)
                continue
            for text, (tokens, mask) in zip(texts, encoded, strict=True):
                self._check_text(check, number, text.rendered, text.content, tokens, is_cut=True)
                self._check_tokens(check, number, tokens, mask, vocab_size)
            if len(encoded) > 1 and encoded[0] == encoded[1]:
                self._note_bad_row(check, number, [EQUAL])

    def _check_tokens(
        self,
        check: Check,
        number: int,
        tokens: list[int],
        mask: list[int],
        vocab_size: int,
    ) -> None:
        limit = self.config.max_length
        if not any(mask):
            self._note_bad_row(check, number, ["the response is empty: it has no token"])
        elif mask[0]:
            self._note_bad_row(check, number, ["the prompt is empty: it has no token"])
        elif media := {*self.media_tokens}.intersection(tokens):
            fault = f"the {self.singular} has token {min(media)}, which stands for an image or a video: drop it"
            self._note_bad_row(check, number, [fault])
        elif len(tokens) > limit:
            fault = f"the {self.singular} has more tokens than data.max_length {limit}"
            remedy = f" ({len(tokens)}): raise it, drop this, or set data.too_long=skip"
            is_skipped = self.config.too_long == "skip"
            check.note(number, "skip" if is_skipped else "error", [fault + ("" if is_skipped else remedy)])
        else:
            check.note(number, "error", self._unknown_tokens(tokens, vocab_size))
            inner = {token for token, this, after in zip(tokens, mask, mask[1:], strict=False) if this and after}
            for end in inner.intersection(self._ends):
                shown = self._tokenizer.decode([end])
                check.note(number, "warn", [f"a response holds {shown!r}, at which sampling ends: is it meant?"])

    def _answer_text(self, chat: Chat, prompt: Any, response: Any) -> ExampleText:
        """Return the text of a prompt and a response, each a text or messages.

        Raises:
            ValueError: they are no conversation.
        """
        content = chat.content_of(prompt)
        if not response:
            raise ValueError("the response is empty")
        if not isinstance(content, str):
            answer = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
            text = self._chat_text(chat, [*content, *read_messages(answer)], len(content))
            return text._replace(ends=[end - len(content) for end in text.ends])
        if not isinstance(response, str):
            raise ValueError(f"expected a text, as the prompt is one, found the response {repr(response)[:80]}")
        return ExampleText([content, self._ended(response)], content)

    def _ended(self, text: str) -> str:
        """Return a text with an end token: the tokenizer's own, unless it has one."""
        return text if text.endswith(self._endings) else text + self._ending

    def _chat_text(
        self,
        chat: Chat,
        messages: list[dict[str, Any]],
        start: int,
    ) -> ExampleText:
        """Return the text of a conversation as the chat template renders it.

        Args:
            start: number of the first message that may have a loss.
        Raises:
            ValueError: no message of the assistant has a loss, or the template does not render it as the model would
                write it.
        """
        whole = chat.with_system(messages)
        num_added = len(whole) - len(messages)
        start += num_added
        answers = [i for i in range(start, len(whole)) if whole[i]["role"] == "assistant" and is_learned(whole[i])]
        if not answers:
            raise ValueError("no message of the assistant, which could be learned: add one")
        if answers[0] == 0:
            raise ValueError("the first message is the assistant's: begin with one that it answers")
        whole = whole[: answers[-1] + 1]
        text = chat.whole_text(whole)
        done = 0
        parts: list[str] = []
        learned = answers if self.config.train_on == "all" else answers[-1:]
        for i in learned:
            before = chat.text_of(whole[:i], continues=False)
            end = self._end(text, before, chat.whole_text(whole[: i + 1]), whole[i])
            parts += [text[done : len(before)], text[len(before) : end]]
            done = end
        return ExampleText(parts, whole, [i + 1 - num_added for i in learned])

    def _end(self, text: str, before: str, after: str, answer: Mapping[str, Any]) -> int:
        """Return where an answer ends in the text of a conversation: behind the end token that follows it, if any.

        Args:
            before: the text up to where the answer begins, as the model gets it.
            after: the text of the conversation up to the answer.
        Raises:
            ValueError: the answer is empty or dropped, or what comes before it changes.
        """
        start = len(before)
        stop = len(commonprefix([text, after]))
        if not text.startswith(before):
            place = len(commonprefix([text, before]))
            raise ValueError(
                "the chat template renders the messages before an answer differently than the beginning of the "
                f"conversation with it, {before[place:][:30]!r} instead of {text[place:][:30]!r}: if it drops the "
                "thoughts of earlier answers, set data.train_on=last"
            )
        end = start
        for name in ("content", "reasoning_content"):
            written = str(answer.get(name, "")).strip()
            place = text.find(written, start, stop)
            if place < 0:
                fault = f"drops the text of an answer: render {name}, or drop it"
                if written in after[start:]:  # Qwen3 writes an empty thought before the last answer alone
                    fault = "renders an answer differently once messages follow it: set data.train_on=last"
                raise ValueError(f"the chat template {fault}")
            end = max(end, place + len(written))
        found = ((text.find(ending, end, stop), ending) for ending in self._endings)
        place, ending = min(((place, ending) for place, ending in found if place >= 0), default=(stop, ""))
        if not text[start:place].strip():
            raise ValueError("a message of the assistant is empty")
        return place + len(ending)


def is_learned(message: Mapping[str, Any]) -> bool:
    """Return whether a message of the assistant is learned, by its own fields.

    Raises:
        ValueError: they are neither 0 nor 1.
    """
    weights = [message.get(name, 1) for name in ("weight", "train")]
    if any(weight not in (0, 1) for weight in weights):
        raise ValueError(f"expected 0 or 1 as weight and train of a message, found {weights}")
    return all(weights)


class ExampleDataset(ConversationDataset[Example]):
    """Examples of supervised fine-tuning."""

    noun = "examples"
    forms = FORMS
    hint = "{prompt: input, response: target}"

    def warnings(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Return the warnings of several ranks' `check`, and of the chat template."""
        uses_chat = self.config.apply_chat_template or any("messages" in form for form in self._forms.values())
        uses_chat &= not self.fields  # else no policy learns from them to end
        ending = chat_end_warnings(self._tokenizer, self._ends, is_learned=True) if uses_chat else []
        return super().warnings(parts) + [f"{self._key}: {line}" for line in ending]

    def _texts(self, chat: Chat, parts: Mapping[str, Any]) -> list[ExampleText]:
        if "messages" in parts:
            return [self._chat_text(chat, read_messages(parts["messages"]), 0)]
        return [self._answer_text(chat, parts["prompt"], parts["response"])]

    def _to_encode(self, text: ExampleText) -> list[RenderedText]:
        before, *rest = text.parts
        texts = [RenderedText(before, text.rendered.is_chat)]
        for part in rest:
            texts += with_context(before, part)
            before += part
        return texts

    def _joined(self, tokens: Sequence[list[int]]) -> Encoded:
        joined = list(tokens[0])
        mask = [0] * len(tokens[0])
        for number in range(1, len(tokens), 2):
            added = added_tokens(tokens[number], tokens[number + 1], self._tokenizer)
            joined += added
            mask += [int(number % 4 == 1)] * len(added)  # two texts a part, and every other part has a loss
        return joined, mask

    def _entry(self, index: int, texts: Sequence[ExampleText], encoded: Sequence[Encoded]) -> Example:
        [(tokens, mask)] = encoded
        return Example(index, tokens, mask)
