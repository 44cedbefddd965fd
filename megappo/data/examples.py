"""Examples that a model is fine-tuned on: conversations as tokens, with a loss on the messages of the assistant."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from megappo.config.config_error import ConfigError
from megappo.config.schema import Data
from megappo.data.chat import Chat, chat_end_warnings
from megappo.data.entries import required_values
from megappo.data.prompt_checks import RECORDS_AT_ONCE, Check
from megappo.data.record_dataset import RecordDataset
from megappo.data.records import Records, Unpack
from megappo.data.tokenizer import encode
from megappo.runtime.heartbeat import heartbeat
from megappo.userland.signatures import is_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS: Sequence[Mapping[str, str]] = (
    {"messages": "messages"},
    {"messages": "conversations"},
    {"prompt": "prompt", "response": "response"},
    {"prompt": "prompt", "response": "completion"},
    {"prompt": "question", "response": "answer"},
)
"""Part of an example -> the field of a file that holds it; the first form whose fields a file has is taken."""
E = TypeVar("E")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Example:
    """Tokens of a conversation.

    Attributes:
        index: position in the dataset (files in order, lines in order), from 0.
        tokens: up to the last one with a loss.
        mask: for each token, 1 if it has a loss, else 0. The first one has none.
    """

    index: int
    tokens: list[int]
    mask: list[int]

    fields: ClassVar[Mapping[str, float]] = {}
    """Fields of its rows beside their mask."""

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


class Piece(NamedTuple):
    """A part of a conversation's text.

    Attributes:
        is_trained: it has a loss.
        is_plain: the tokenizer adds its special tokens, as no chat template has.
    """

    text: str
    is_trained: bool
    is_plain: bool = False


class ConversationDataset(RecordDataset[E]):
    """Records of one or several conversations each; arguments as of `RecordDataset`.

    Args:
        ends: tokens that end a response. The first one in each is the last one with a loss.
    Attributes:
        forms: known forms of files; hint: a value of data.columns.
    Raises:
        ConfigError: a file has no known form; the chat template does not read its arguments.
    """

    forms: ClassVar[Sequence[Mapping[str, str]]]
    hint: ClassVar[str]

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
        self._tokenizer = tokenizer
        self._ends = ends
        self._ending = tokenizer.convert_ids_to_tokens(ends[-1])
        self._chat = Chat(tokenizer, config)
        super().__init__(files, config, seed, key, None, unpack, weights)
        self._forms = {file.path: self._form(file) for file in self.files}

    def _form(self, file: Records) -> Mapping[str, str]:
        if self.config.columns:
            return {str(part): name for part, name in self.config.columns.items()}
        known = (form for form in self.forms if set(form.values()) <= set(file.fields))
        if (form := next(known, None)) is not None:
            return form
        expected = "; ".join(" and ".join(form.values()) for form in self.forms)
        raise ConfigError(
            f"{self._key}: {file.path} has the fields {', '.join(file.fields)}; expected one of: {expected}. Name its "
            f"fields in data.columns, such as {self.hint}"
        )

    def at(self, indices: Sequence[int]) -> list[E]:
        """Return the entries at these positions in the dataset, which must have no fault."""
        records = [self._record(index) for index in indices]
        forms = [self._forms[self._located(index)[0].path] for index in indices]
        texts = [self._conversations(record, form) for record, form in zip(records, forms, strict=True)]
        encoded = self._encoded(texts)
        return [self._entry(*parts) for parts in zip(indices, encoded, records, forms, strict=True)]

    @abstractmethod
    def _conversations(self, record: Any, form: Mapping[str, str]) -> list[list[Piece]]:
        """Return the conversations of a record, each in pieces with and without a loss, one after the other.

        Raises:
            ValueError: it has none.
        """

    @abstractmethod
    def _entry(self, index: int, encoded: Sequence[Encoded], record: Any, form: Mapping[str, str]) -> E:
        """Return the entry of a record, of whose conversations these are the tokens."""

    def check(self, vocab_size: int, chosen: Callable[[int], Sequence[int]] = range) -> list[Check]:
        """Check the records of each file."""
        return [self._check_file(file, chosen(len(file)), vocab_size) for file in self.files]

    def _check_file(self, file: Records, numbers: Sequence[int], vocab_size: int) -> Check:
        check = Check(len(numbers))
        for start in range(0, len(numbers), RECORDS_AT_ONCE):
            heartbeat.beat()
            part = numbers[start : start + RECORDS_AT_ONCE]
            texts: dict[int, list[list[Piece]]] = {}
            for number, record in zip(part, file.at(part), strict=True):
                try:
                    texts[number] = self._conversations(record, self._forms[file.path])
                except ValueError as error:
                    self._note(check, number, error.args)
            for number, encoded in zip(texts, self._encoded(list(texts.values())), strict=True):
                self._check_encoded(check, number, encoded, vocab_size)
        return check

    def _check_encoded(self, check: Check, number: int, encoded: Sequence[Encoded], vocab_size: int) -> None:
        for tokens, mask in encoded:
            self._check_tokens(check, number, tokens, mask, vocab_size)

    def _check_tokens(self, check: Check, number: int, tokens: list[int], mask: list[int], vocab_size: int) -> None:
        limit = self.config.max_length
        if not any(mask):
            self._note(check, number, ["the response is empty: it has no token"])
        elif mask[0]:
            self._note(check, number, ["the prompt is empty: it has no token"])
        elif len(tokens) > limit:
            text = f"the example has more tokens than data.max_length {limit}"
            remedy = f" ({len(tokens)}): raise it, drop this, or set data.too_long=skip"
            is_skipped = self.config.too_long == "skip"
            check.note(number, "skip" if is_skipped else "error", [text + ("" if is_skipped else remedy)])
        elif max(tokens) >= vocab_size:
            known = f"vocab_size in config.json is {vocab_size}"
            fault = f"the example has token {max(tokens)}, but {known}: use the tokenizer that belongs to the model"
            check.note(number, "error", [fault])

    def _note(self, check: Check, number: int, faults: Sequence[str]) -> None:
        if self.config.on_bad_row == "skip":
            check.note(number, "skip", faults)
        else:
            check.note(number, "error", [f"{fault} (data.on_bad_row=skip leaves such out)" for fault in faults])

    def _answer_pieces(self, prompt: Any, response: Any) -> list[Piece]:
        """Return the pieces of a prompt and a response, each a text or messages.

        Raises:
            ValueError: they are no conversation.
        """
        content = self._chat.content_of(prompt)
        if not response:
            raise ValueError("the response is empty")
        if not isinstance(content, str):
            answer = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
            return self._chat_pieces([*content, *as_messages(answer)], len(content))
        if not isinstance(response, str):
            raise ValueError(f"expected a text, as the prompt is one, found the response {repr(response)[:80]}")
        ending = "" if response.endswith(self._ending) else self._ending
        return [Piece(content, is_trained=False, is_plain=True), Piece(response + ending, is_trained=True)]

    def _chat_pieces(self, messages: list[dict[str, Any]], start: int) -> list[Piece]:
        """Return the pieces of a conversation as the chat template renders it.

        Args:
            start: number of the first message that may have a loss.
        Raises:
            ValueError: no message of the assistant has a loss, or the template does not render it as the model would
                write it.
        """
        whole = self._chat.with_system(messages)
        start += len(whole) - len(messages)
        answers = [i for i in range(start, len(whole)) if whole[i]["role"] == "assistant"]
        if not answers:
            raise ValueError("no message of the assistant, which could be learned: add one")
        if answers[0] == 0:
            raise ValueError("the first message is the assistant's: begin with one that it answers")
        pieces: list[Piece] = []
        text = ""
        for i in answers if self.config.train_on == "all" else answers[-1:]:
            before = self._chat.text_of(whole[:i], continues=False)
            after = self._chat.whole_text(whole[: i + 1])
            _check_rendering(text, before, after, whole[i]["content"])
            pieces += [Piece(before[len(text) :], is_trained=False), Piece(after[len(before) :], is_trained=True)]
            text = after
        return pieces

    def _encoded(self, records: Sequence[Sequence[Sequence[Piece]]]) -> Iterator[list[Encoded]]:
        """Yield the tokens of each record's conversations, up to the last one with a loss, and their masks.

        Pieces are tokenised one by one: a model that continues a prompt has the prompt's own tokens before it.
        """
        every = [piece for texts in records for pieces in texts for piece in pieces]
        plain = iter(encode([piece.text for piece in every if piece.is_plain], self._tokenizer, special=True))
        others = iter(encode([piece.text for piece in every if not piece.is_plain], self._tokenizer, special=False))
        for texts in records:
            encoded = []
            for pieces in texts:
                parts = [(next(plain if piece.is_plain else others), piece.is_trained) for piece in pieces]
                encoded.append(self._joined(parts))
            yield encoded

    def _joined(self, parts: Sequence[tuple[list[int], bool]]) -> Encoded:
        """Return the tokens and the mask of a conversation, given the tokens of its pieces."""
        tokens: list[int] = []
        mask: list[int] = []
        length = 0
        for added, is_trained in parts:
            num_trained = self._num_trained(added) if is_trained else 0
            mask += [1] * num_trained + [0] * (len(added) - num_trained)
            length = len(tokens) + num_trained if num_trained else length
            tokens += added
        return tokens[:length], mask[:length]

    def _num_trained(self, response: list[int]) -> int:
        """Return how many tokens of a response have a loss: those up to its first end token."""
        return next((i + 1 for i, token in enumerate(response) if token in self._ends), len(response))


class ExampleDataset(ConversationDataset[Example]):
    """Examples of supervised fine-tuning."""

    noun = "examples"
    forms = FORMS
    hint = "{prompt: input, response: target}"

    def warnings(self, parts: Sequence[Sequence[Check]]) -> list[str]:
        """Return the warnings of several ranks' `check`, and of the chat template."""
        uses_chat = self.config.apply_chat_template or any("messages" in form for form in self._forms.values())
        ending = chat_end_warnings(self._tokenizer, self._ends, is_learned=True) if uses_chat else []
        return super().warnings(parts) + [f"{self._key}: {line}" for line in ending]

    def _conversations(self, record: Any, form: Mapping[str, str]) -> list[list[Piece]]:
        values = required_values(record, dict.fromkeys(form.values(), "data.columns"))
        if "messages" in form:
            return [self._chat_pieces(as_messages(values[form["messages"]]), 0)]
        return [self._answer_pieces(values[form["prompt"]], values[form["response"]])]

    def _entry(self, index: int, encoded: Sequence[Encoded], record: Any, form: Mapping[str, str]) -> Example:
        [(tokens, mask)] = encoded
        return Example(index, tokens, mask)


def as_messages(value: Any) -> list[dict[str, Any]]:
    """Return a conversation as messages of role and content; ShareGPT's have `from` and `value`.

    Raises:
        ValueError: it is none.
    """
    messages = []
    for one in value if isinstance(value, list) else ():
        if isinstance(one, dict) and one.get("from") in SHAREGPT_ROLES:
            one = {"role": SHAREGPT_ROLES[one["from"]], "content": one.get("value")}
        messages.append(one)
    if not (messages and all(map(is_message, messages))):
        raise ValueError(f"expected a list of {{'role': str, 'content': str}}, found {repr(value)[:80]}")
    return messages


def _check_rendering(text: str, before: str, after: str, answer: str) -> None:
    """Check that a template renders an answer as the model would write it.

    Args:
        text: the conversation up to the answer before. before: up to where this answer begins. after: up to its end.
    Raises:
        ValueError: the answer is empty or dropped, or what comes before it changes.
    """
    if not answer.strip():
        raise ValueError("a message of the assistant is empty")
    if not (before.startswith(text) and after.startswith(before)):
        raise ValueError(
            "the chat template renders the messages before an answer differently than the beginning of the "
            "conversation with it: if it drops the thoughts of earlier answers, set data.train_on=last"
        )
    if answer.strip() not in after[len(before) :]:
        raise ValueError("the chat template drops the text of an answer: correct the template, or the message")
