"""Pairs of responses, of which one was preferred: what a reward model learns from. Opens the examples of a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megappo.architecture.parsing import read_architecture
from megappo.config.schema import Config
from megappo.data.entries import look_up, required_values
from megappo.data.examples import ConversationDataset, Encoded, Example, ExampleDataset, Piece, as_messages
from megappo.data.prompt_checks import Check
from megappo.data.records import Records, Unpack
from megappo.data.tokenizer import padding_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SIDES = ("chosen", "rejected")
MARGIN, TIE = "margin", "tie"
"""Fields that a file may have: by how much a response is better; true where neither is."""


@dataclass(frozen=True)
class Pair:
    """Two responses to a prompt.

    Attributes:
        index: position in the dataset (files in order, lines in order), from 0.
        rows: the conversation with the chosen response, and that with the rejected one. The last token of each, at
            which it is scored, has mask 1.
        margin: by which the chosen one's score should exceed the other's.
    """

    index: int
    rows: tuple[Example, Example]
    margin: float

    @property
    def fields(self) -> Mapping[str, float]:
        """Fields of its rows beside their mask."""
        return {"margins": self.margin}


class PreferenceDataset(ConversationDataset[Pair]):
    """Pairs of some files; arguments as of `ConversationDataset`.

    Args:
        padding: a token that is not read at the end of a conversation; see `tokenizer.padding_token`.
    """

    noun = "pairs"
    forms = (
        {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        {"prompt": "question", "chosen": "chosen", "rejected": "rejected"},
        {"chosen": "chosen", "rejected": "rejected"},
    )
    hint = "{chosen: better, rejected: worse}"

    def __init__(self, *args: Any, padding: int | None, **settings: Any):
        super().__init__(*args, **settings)
        self._padding = padding

    def _form(self, file: Records) -> Mapping[str, str]:
        form = super()._form(file)
        has_margin = not self.config.columns and MARGIN in file.fields
        return {**form, MARGIN: MARGIN} if has_margin else form

    def _conversations(self, record: Any, form: Mapping[str, str]) -> list[list[Piece]]:
        values = required_values(record, dict.fromkeys(form.values(), "data.columns"))
        if record.get(TIE):
            raise ValueError("the record is a tie, from which no order is learned")
        if MARGIN in form:
            _margin(values[form[MARGIN]])
        prompt = values[form["prompt"]] if "prompt" in form else None
        return [self._conversation(prompt, values[form[side]]) for side in SIDES]

    def _conversation(self, prompt: Any, response: Any) -> list[Piece]:
        """Return the pieces of a whole conversation: of `response` alone where that holds the prompt, too."""
        if isinstance(response, str):
            return self._text_pieces(response) if prompt is None else self._answer_pieces(prompt, response)
        messages = as_messages(response)
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"a conversation ends with a message of the {messages[-1]['role']}, not the assistant's")
        if messages[0]["role"] == "assistant" and prompt is not None:
            return self._answer_pieces(prompt, messages)
        if prompt is not None and not _is_within(prompt, messages):
            raise ValueError(f"the prompt {repr(prompt)[:80]} is not in the conversation {repr(messages)[:80]}")
        return self._chat_pieces(messages, 0)

    def _text_pieces(self, text: str) -> list[Piece]:
        """Return the pieces of a text that holds a whole conversation."""
        content = self._chat.content_of(text)
        if not isinstance(content, str):
            raise ValueError(
                "the responses are texts without a prompt, which data.apply_chat_template cannot divide into messages: "
                "name the prompt in data.columns, or set apply_chat_template to false"
            )
        text = content.removesuffix(self._ending)
        return [Piece(text, is_trained=False, is_plain=True), Piece(self._ending, is_trained=True)]

    def _joined(self, parts: Sequence[tuple[list[int], bool]]) -> Encoded:
        tokens, _ = super()._joined(parts)
        while tokens and tokens[-1] == self._padding:
            tokens.pop()
        return tokens, [int(place == len(tokens) - 1) for place in range(len(tokens))]

    def _check_encoded(self, check: Check, number: int, encoded: Sequence[Encoded], vocab_size: int) -> None:
        super()._check_encoded(check, number, encoded, vocab_size)
        (chosen, _), (rejected, _) = encoded
        if chosen == rejected:
            self._note(check, number, ["chosen and rejected are equal, a tie, from which no order is learned"])

    def _entry(self, index: int, encoded: Sequence[Encoded], record: Any, form: Mapping[str, str]) -> Pair:
        chosen, rejected = (Example(index, tokens, mask) for tokens, mask in encoded)
        margin = _margin(look_up(record, form[MARGIN])) if MARGIN in form else 0.0
        return Pair(index, (chosen, rejected), margin)


def open_examples(
    config: Config, tokenizer: "PreTrainedTokenizerBase", ends: Sequence[int], unpack: Unpack | None = None
) -> tuple[ConversationDataset[Any], dict[str, ConversationDataset[Any]]]:
    """Open the examples of data.train_files, and those of each of data.val_files, by name; arguments as of
    `ConversationDataset`."""
    data = config.data
    opened: Any = partial(ExampleDataset, config=data)
    if config.trains_reward_model:
        padding = padding_token(read_architecture(config.model.path, head="value"), tokenizer)
        opened = partial(PreferenceDataset, config=data.model_copy(update={"train_on": "last"}), padding=padding)
    opened = partial(opened, tokenizer=tokenizer, ends=ends, seed=config.trainer.seed, unpack=unpack)
    train = opened(data.files, weights=tuple(data.shares.values()))
    val = {}
    for name, file in zip(data.val_names, data.val_files, strict=True):
        val[name] = opened((file,), key="data.val_files")
    return train, val


def _margin(value: Any) -> float:
    """Return a margin.

    Raises:
        ValueError: it is no number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a number as the margin, found {repr(value)[:80]}")
    return float(value)


def _is_within(prompt: Any, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether messages contain a prompt: a text, or the messages that they begin with."""
    if isinstance(prompt, str):
        return any(message["content"] == prompt and message["role"] != "assistant" for message in messages)
    return isinstance(prompt, list) and list(messages[: len(prompt)]) == prompt
