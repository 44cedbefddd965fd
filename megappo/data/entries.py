"""A record of a data file as the program uses it: checked, its chat messages rendered, its text as tokens."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megappo.config.schema import Data
from megappo.data.chat import Chat, Conversation
from megappo.data.faults import Check, Done
from megappo.data.fields import Fields, look_up
from megappo.data.lost_text import lost_text
from megappo.data.records import Records
from megappo.data.special_tokens import odd_tokens
from megappo.data.token_bounds import TokenBounds
from megappo.data.tokenizer import encode, ids_by_file
from megappo.runtime.heartbeat import LIFE
from megappo.userland.builtin import check_label
from megappo.userland.forms import PROMPTS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_NESTING = 100
"""Lists and objects within each other: Python's own limits, in reading, writing and passing on, lie above."""
RECORDS_AT_ONCE = 1000
LOOKED_AT_FOR_LOSS = 1000
"""Records of a file whose tokens are made text again, where these may have lost some: it takes as long as the rest."""
COMPARED = 100
"""Records of a file whose tokens are compared with those that tokenizer.json gives."""
OTHERWISE = (
    "the prompt has other tokens by tokenizer.json alone than with tokenizer_config.json: make both say the same "
    "(added tokens, split_special_tokens), as the tokenizer's save_pretrained does"
)


@dataclass(frozen=True)
class Entry:
    """Text and label of a record.

    Attributes:
        text: as the model sees it.
        conversation: that the text was made from.
        columns: what the reward function takes besides.
        rank: by which it is ordered.
        left_out: why some fields that no function requests by name are not in columns.
    """

    text: str
    conversation: Conversation
    label: Any
    columns: dict[str, Any]
    rank: float = 0.0
    left_out: tuple[str, ...] = ()

    @property
    def is_chat(self) -> bool:
        """Whether it is of chat messages, whose template brings the special tokens itself."""
        return not isinstance(self.conversation, str)


def entry_of(record: Any, fields: Fields, chat: Chat) -> Entry:
    """A record's entry.

    Raises:
        ValueError: why it has none; each argument is a fault.
    """
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    values, missing = [], []
    for wanted in fields.wanted:
        try:
            values.append(look_up(record, wanted.name))
        except LookupError as reached:
            missing.append(f"{wanted.fault}{reached}")
    if missing:
        raise ValueError(*missing)
    prompt, label, *more = values
    rank = 0.0 if fields.order_by is None else fields.rank_of(more[0])
    columns = fields.columns_of(record)
    _check_value("prompt", prompt)
    _check_value("label", label)
    check_label(label, fields.reward.weights)
    left_out = []
    for name, value in list(columns.items()):
        try:
            _check_value(f"field {name!r}, which reward.function takes,", value)
        except ValueError as error:
            if fields.takes.welcome is not None or name in fields.takes.needed:
                raise
            left_out.append(f"{error}, or do without: it is left out")
            del columns[name]
    conversation = chat.conversation(prompt)
    if fields.takes.raw_prompts:
        columns[PROMPTS] = conversation
    return Entry(chat.text_of(conversation), conversation, label, columns, rank, tuple(left_out))


def tokens_of(entries: Sequence[Entry], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Token ids of each entry; a single BOS where both its text (from a chat template) and the tokenizer add one."""
    twice = [tokenizer.bos_token_id] * 2
    tokens: list[list[int]] = [[]] * len(entries)
    for is_chat in (False, True):
        places = [place for place, entry in enumerate(entries) if entry.is_chat == is_chat]
        texts = [entries[place].text for place in places]
        for place, ids in zip(places, encode(texts, tokenizer, special=not is_chat), strict=True):
            tokens[place] = ids[1:] if ids[:2] == twice else ids
    return tokens


class Checker:
    """Looks for what is wrong with records.

    Args:
        config: max_prompt_length, and what is done about faults.
        vocab_size: tokens from this number on have no embedding in a model.
    """

    def __init__(self, fields: Fields, chat: Chat, tokenizer: "PreTrainedTokenizerBase", config: Data, vocab_size: int):
        self._fields = fields
        self._chat = chat
        self._config = config
        self._on_bad_row: Done = "skip" if config.on_bad_row == "skip" else "bad_row"
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._bounds = TokenBounds(tokenizer)
        self._may_lose = self._bounds.at_most("") == math.inf
        self._all_embedded = max(tokenizer.get_vocab().values()) < vocab_size

    def check(self, records: Records, numbers: Sequence[int]) -> Check:
        """What is wrong with the records of these numbers, from 0; of texts that the tokenizer loses, the first."""
        check = Check(len(numbers))
        for start in range(0, len(numbers), RECORDS_AT_ONCE):
            LIFE.sign()
            part = numbers[start : start + RECORDS_AT_ONCE]
            entries: dict[int, Entry] = {}
            for number, record in zip(part, records.at(part), strict=True):
                try:
                    entries[number] = entry_of(record, self._fields, self._chat)
                    check.add(number, entries[number].left_out, "warn")
                except ValueError as error:
                    check.add(number, error.args, self._on_bad_row)
            if self._fields.order_by is not None:
                check.ranks.extend(entries[number].rank if number in entries else math.nan for number in part)
            for number, fault, done in self._wrong_tokens(entries):
                if done != "lost" or done not in check.found:
                    check.add(number, [fault], done)
        return check

    def _wrong_tokens(self, entries: dict[int, Entry]) -> Iterator[tuple[int, str, Done]]:
        """Prompts without tokens, with too many or unknown ones, and what is done about them; where a text's length
        tells, it is not tokenised. An unknown token is always an error: it is the tokenizer that is wrong."""
        limit, too_long = self._config.max_prompt_length, self._config.too_long
        is_cut = too_long == "truncate_left"
        unsure: dict[int, Entry] = {}
        for number, entry in entries.items():
            fewest = self._bounds.at_least(entry.text)
            if fewest > limit and (self._all_embedded or not is_cut):
                yield number, self._too_long(f"{len(entry.text):,} characters, so at least {fewest:,}"), too_long
            elif self._bounds.at_most(entry.text) > limit or not self._all_embedded or number < COMPARED:
                unsure[number] = entry
        for number, tokens in zip(unsure, tokens_of(list(unsure.values()), self._tokenizer), strict=True):
            entry = unsure[number]
            if len(tokens) > limit:
                yield number, self._too_long(f"{len(tokens)}"), too_long
            if not tokens:
                yield number, "the prompt is empty: it has no token", self._on_bad_row
                continue
            if (len(tokens) <= limit or is_cut) and (largest := max(tokens[-limit:])) >= self._vocab_size:
                yield number, _unknown(largest, self._vocab_size), "error"
            if self._may_lose and number < LOOKED_AT_FOR_LOSS:
                decoded = self._tokenizer.decode(tokens)
                if lost := lost_text(entry.text, decoded, self._tokenizer.unk_token):
                    yield number, lost, "lost"
            if number < COMPARED:
                by_file = ids_by_file(entry.text, self._tokenizer, special=not entry.is_chat) or tokens
                if by_file[-len(tokens) :] != tokens:
                    yield number, OTHERWISE, "error"
                for odd in odd_tokens(entry.conversation, tokens, self._tokenizer):
                    yield number, odd, "warn"

    def _too_long(self, found: str) -> str:
        limit = f"{self._fields.section}.max_prompt_length {self._config.max_prompt_length}"
        if self._config.too_long != "error":
            return f"the prompt has more tokens than {limit}"  # the same of all, which are counted together
        return f"the prompt has {found} tokens, more than {limit}: raise it, drop this, or set data.too_long"


_WRITER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def _check_value(name: str, value: Any) -> None:
    """See that a value can be tokenised, passed to another process and written down."""
    try:
        text = value if isinstance(value, str) else _WRITER.encode(value)
        text.encode()
    except RecursionError:
        raise ValueError(_too_deep(name)) from None
    except UnicodeEncodeError as error:
        found = error.object[error.start]
        raise ValueError(f"the {name} holds {found!a}, half of a character: write both halves") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"the {name} is not JSON ({error}): convert it to text or a number") from None
    if text is not value and text.count("[") + text.count("{") > MAX_NESTING and _nesting(value) > MAX_NESTING:
        raise ValueError(_too_deep(name))


def _nesting(value: Any) -> int:
    """How many lists and objects lie within each other."""
    level, depth = [value], 0
    while level:
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
        depth += bool(inner)
    return depth


def _too_deep(name: str) -> str:
    return f"the {name} is nested more than {MAX_NESTING} deep: flatten it, or write it as text"


def _unknown(token: int, vocab_size: int) -> str:
    return (
        f"the prompt has token {token}, for which a model has no embedding (the smallest vocab_size in config.json is "
        f"{vocab_size}): drop it, or use the tokenizer that belongs to the model"
    )
