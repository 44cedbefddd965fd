"""Pairs of responses, of which one was preferred: what a reward model learns from. Opens the examples of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megappo.architecture.parsing import read_architecture
from megappo.config.schema import Config
from megappo.config.score_checks import shapings
from megappo.data.chat import Chat, read_messages
from megappo.data.entries import finite_number
from megappo.data.examples import ConversationDataset, Encoded, Example, ExampleDataset, ExampleText, is_learned
from megappo.data.records import Records, Unpack
from megappo.data.scored_examples import ScoredDataset
from megappo.data.tokenizer import RenderedText, padding_token

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
        rows: the conversation with the chosen response, and the conversation with the rejected one. The last token of
            each, at which it is scored, has mask 1.
        margin: difference by which the chosen one's score should exceed the other's.
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
    fields = ("margins",)
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

    def _texts_of(self, record: Any, file: Records) -> list[ExampleText]:
        if isinstance(record, dict) and record.get(TIE):
            raise ValueError("the record is a tie, from which no order is learned")
        return super()._texts_of(record, file)

    def _texts(self, chat: Chat, parts: Mapping[str, Any]) -> list[ExampleText]:
        margin = finite_number(parts.get(MARGIN, 0.0), "the margin")
        texts = [self._whole_text(chat, parts.get("prompt"), parts[side]) for side in SIDES]
        return [text._replace(outcome=margin) for text in texts]

    def _whole_text(self, chat: Chat, prompt: Any, response: Any) -> ExampleText:
        """Return the text of a whole conversation: of `response` alone where that holds the prompt, too."""
        if isinstance(response, str) and prompt is not None:
            return self._answer_text(chat, prompt, response)
        if isinstance(response, str):
            content = chat.content_of(response)
            if isinstance(content, str):
                return ExampleText([self._ended(content)], content)
            raise ValueError(
                "the responses are texts without a prompt, which data.apply_chat_template cannot divide into messages: "
                "name the prompt in data.columns, or set apply_chat_template to false"
            )
        messages = read_messages(response)
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"a conversation ends with a message of the {messages[-1]['role']}, not the assistant's")
        if not is_learned(messages[-1]):
            raise ValueError("the last message, which is scored, has weight 0 or train false: drop that, or the pair")
        if messages[0]["role"] == "assistant" and prompt is not None:
            return self._answer_text(chat, prompt, messages)
        if prompt is not None and not _is_within(prompt, messages):
            raise ValueError(f"the prompt {repr(prompt)[:80]} is not in the conversation {repr(messages)[:80]}")
        return self._chat_text(chat, messages, 0)

    def _to_encode(self, text: ExampleText) -> list[RenderedText]:
        return [text.rendered]

    def _joined(self, tokens: Sequence[list[int]]) -> Encoded:
        """Return the tokens of a conversation without padding, of which the last one is scored."""
        [whole] = tokens
        while whole and whole[-1] == self._padding:
            whole.pop()
        return whole, [int(place == len(whole) - 1) for place in range(len(whole))]

    def _entry(self, index: int, texts: Sequence[ExampleText], encoded: Sequence[Encoded]) -> Pair:
        chosen, rejected = (Example(index, tokens, mask) for tokens, mask in encoded)
        return Pair(index, (chosen, rejected), texts[0].outcome)


def open_examples(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    ends: Sequence[int],
    unpack: Unpack | None = None,
) -> tuple[ConversationDataset[Any], dict[str, ConversationDataset[Any]]]:
    """Open the examples of data.train_files, and the examples of each of data.val_files, by name; arguments as of
    `ConversationDataset`."""
    data = config.data
    architecture = read_architecture(config.model.path, head="value")
    opened: Any = partial(ExampleDataset, config=data)
    if config.recipe.trains == "critic":
        opened = partial(ScoredDataset, config=data, shapings=list(shapings(config)))
    if config.recipe.has_pairs:
        padding = padding_token(architecture, tokenizer)
        opened = partial(PreferenceDataset, config=data.model_copy(update={"train_on": "last"}), padding=padding)
    opened = partial(
        opened,
        tokenizer=tokenizer,
        ends=ends,
        seed=config.trainer.seed,
        unpack=unpack,
    )
    train = opened(data.files, weights=tuple(data.shares.values()))
    val = {}
    for name, file in zip(data.val_names, data.val_files, strict=True):
        val[name] = opened((file,), key="data.val_files")
    if architecture.vision is not None:
        for one in (train, *val.values()):
            one.media_tokens = architecture.vision.media_tokens
    return train, val


def _is_within(prompt: Any, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether messages contain a prompt: a text, or the messages that they begin with."""
    if isinstance(prompt, str):
        return any(message["content"] == prompt and message["role"] != "assistant" for message in messages)
    return isinstance(prompt, list) and list(messages[: len(prompt)]) == prompt
