"""Checks of prompts: their records, tokens and special tokens, and whether the tokenizer keeps their text.

Several ranks check parts of a file; their results are merged and reported once.
"""

import math
import sys
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from megappo.config.config_error import shorten
from megappo.config.schema import Data, Reward
from megappo.data.chat import Chat, PromptContent
from megappo.data.entries import PromptEntry, RecordFields, entry_of, tokens_of
from megappo.data.records import Records
from megappo.data.tokenizer import ids_by_file, keeps_bytes
from megappo.runtime.heartbeat import heartbeat
from megappo.userland.spec import parse_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_LENGTHS = 3
"""Lengths of too long prompts up to which each is an error of its own."""
RECORDS_AT_ONCE = 1000
COMPARED = 100
"""Records of a file whose tokens are decoded, and compared with those that tokenizer.json gives."""
MAX_FAULTS = 10
"""Different faults of a file that are reported; the records with others are counted."""
MAX_NAMED = 3
"""Records named for one fault."""
OTHER_FAULTS = "wrong in other ways"
OTHER_TOKENS = (
    "the prompt has other tokens by tokenizer.json alone than with tokenizer_config.json: make both agree (added "
    "tokens, split_special_tokens), as the tokenizer's save_pretrained does"
)
LOST_TEXT = (
    "the tokenizer loses at least half of the prompt's characters: use a model made for such text, or write prompts in "
    "its characters"
)
Action = Literal["error", "skip", "truncate_left", "warn"]
"""Actions on a fault, by data.too_long and data.on_bad_row."""


class Fault(NamedTuple):
    """A fault of the record of this number, from 0, and what is done about it."""

    number: int
    action: Action
    text: str


@dataclass
class Check:
    """Result of checking some records of a file.

    Attributes:
        num_checked: how many.
        ranks: by which the records are ordered, NaN for faulty ones; empty without data.order_by.
    """

    num_checked: int = 0
    faults: list[Fault] = field(default_factory=list)
    ranks: "array[float]" = field(default_factory=lambda: array("d"))

    @property
    def left_out(self) -> set[int]:
        """Numbers, from 0, of the records that the run leaves out."""
        return {fault.number for fault in self.faults if fault.action == "skip"}

    def note(self, number: int, action: Action, texts: Iterable[str]) -> None:
        """Note a record's faults, and what is done about them."""
        self.faults += [Fault(number, action, sys.intern(text)) for text in texts]  # few texts, of many records

    def lines(self, key: str, file: Records, action: Action) -> Iterator[str]:
        """Yield one line per fault with this action.

        Args:
            key: of the config, that names the file.
        """
        numbers: dict[str, list[int]] = {}
        for fault in self.faults:
            if fault.action == action:
                is_known = fault.text in numbers or len(numbers) < MAX_FAULTS
                numbers.setdefault(fault.text if is_known else OTHER_FAULTS, []).append(fault.number + 1)
        for text, at in numbers.items():
            places = f"{file.unit}{'s' if len(at) > 1 else ''} {', '.join(map(str, at[:MAX_NAMED]))}"
            if len(at) > MAX_NAMED:
                places += f" and {len(at) - MAX_NAMED:,} more"
            fields = f"; the file has: {shorten(', '.join(file.fields))}" if text.startswith("no field") else ""
            yield f"{key}: {file.path} {places}: {text}{fields}"


def merge_checks(parts: Sequence[Check]) -> Check:
    """Merge the checks of parts of a file; its faults are in the order of the file."""
    whole = Check()
    for part in parts:
        whole.num_checked += part.num_checked
        whole.faults += part.faults
        whole.ranks.extend(part.ranks)
    whole.faults.sort(key=attrgetter("number"))
    return whole


class PromptChecker:
    """Checks the records of data files.

    Args:
        config: max_prompt_length, and what is done about faults.
        vocab_size: tokens from this number on have no embedding in a model.
    """

    def __init__(
        self, fields: RecordFields, chat: Chat, tokenizer: "PreTrainedTokenizerBase", config: Data, vocab_size: int
    ):
        self._fields = fields
        self._chat = chat
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._keeps_bytes = keeps_bytes(tokenizer)
        self._all_embedded = max(tokenizer.get_vocab().values()) < vocab_size
        self._num_special = tokenizer.num_special_tokens_to_add(pair=False)

    def check(self, records: Records, numbers: Sequence[int]) -> Check:
        """Check the records of these numbers, from 0."""
        check = Check(len(numbers))
        for start in range(0, len(numbers), RECORDS_AT_ONCE):
            heartbeat.beat()
            part = numbers[start : start + RECORDS_AT_ONCE]
            entries: dict[int, PromptEntry] = {}
            for number, record in zip(part, records.at(part), strict=True):
                try:
                    entries[number] = entry_of(record, self._fields, self._chat)
                    check.note(number, "warn", entries[number].left_out)
                except ValueError as error:
                    self._note_bad_row(check, number, error.args)
            if self._fields.order_by is not None:
                check.ranks.extend(entries[number].rank if number in entries else math.nan for number in part)
            self._check_tokens(check, entries)
        return check

    def _check_tokens(self, check: Check, entries: Mapping[int, PromptEntry]) -> None:
        """Note prompts with no, too many or unknown tokens. Prompts that are certain to fit are not tokenised."""
        limit, too_long = self._config.max_prompt_length, self._config.too_long
        unsure = {}
        for number, entry in entries.items():
            if number < COMPARED or not self._is_short(entry.text):
                unsure[number] = entry
        tokenised = tokens_of(list(unsure.values()), self._tokenizer)
        lengths = {len(tokens) for tokens in tokenised if len(tokens) > limit}
        longest = f" (the longest has {max(lengths)})" if len(lengths) > MOST_LENGTHS else ""
        for (number, entry), tokens in zip(unsure.items(), tokenised, strict=True):
            if not tokens:
                self._note_bad_row(check, number, ["the prompt is empty: it has no token"])
                continue
            if len(tokens) > limit:
                check.note(number, too_long, [self._too_long(len(tokens), longest)])
            if len(tokens) <= limit or too_long == "truncate_left":
                check.note(number, "error", self._unknown_tokens(tokens[-limit:]))
            if number < COMPARED:
                by_file = ids_by_file(entry.text, self._tokenizer, special=not entry.is_chat) or tokens
                if by_file[-len(tokens) :] != tokens:
                    check.note(number, "error", [OTHER_TOKENS])
                check.note(number, "warn", special_token_warnings(entry.content, tokens, self._tokenizer))
                if not self._keeps_bytes and loses_text(entry.text, tokens, self._tokenizer):
                    check.note(number, "warn", [LOST_TEXT])

    def _is_short(self, text: str) -> bool:
        """True if a prompt fits by its bytes, of which each token has one or more, and every model knows its tokens."""
        if not (self._keeps_bytes and self._all_embedded and unicodedata.is_normalized("NFC", text)):
            return False
        return len(text.encode()) + self._num_special <= self._config.max_prompt_length

    def _note_bad_row(self, check: Check, number: int, faults: Sequence[str]) -> None:
        if self._config.on_bad_row == "skip":
            check.note(number, "skip", faults)
        else:
            check.note(number, "error", [f"{fault} (data.on_bad_row=skip leaves such out)" for fault in faults])

    def _unknown_tokens(self, tokens: Sequence[int]) -> Iterator[str]:
        """Yield the fault of a prompt with a token that a model does not know: the tokenizer is another model's."""
        if max(tokens) >= self._vocab_size:
            yield (
                f"the prompt has token {max(tokens)}, for which a model has no embedding (the smallest vocab_size in "
                f"config.json is {self._vocab_size}): drop it, or use the tokenizer that belongs to the model"
            )

    def _too_long(self, num_tokens: int, longest: str) -> str:
        """Return the fault of a prompt; many prompts have the same, with the length of the longest."""
        limit = f"{self._fields.section}.max_prompt_length {self._config.max_prompt_length}"
        if self._config.too_long != "error":
            return f"the prompt has more tokens than {limit}"  # the same for all, which are counted together
        count = "more tokens" if longest else f"{num_tokens} tokens, more"
        return f"the prompt has {count} than {limit}{longest}: raise it, drop this, or set data.too_long"


def loses_text(text: str, tokens: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether at least half of a text's characters are missing from its decoded tokens.

    Blanks, case, accents and compatibility forms do not count, as a tokenizer may normalise them.
    """
    decoded = tokenizer.decode(tokens)
    if tokenizer.unk_token:
        decoded = decoded.replace(tokenizer.unk_token, "")
    before, after = _letters(text), _letters(decoded)
    lost = (before - after).total()
    return lost > 0 and 2 * lost >= before.total()


def _letters(text: str) -> Counter[str]:
    letters = unicodedata.normalize("NFKD", text.casefold())
    return Counter(letter for letter in letters if not (letter.isspace() or unicodedata.combining(letter)))


def special_token_warnings(
    content: PromptContent, tokens: Sequence[int], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[str]:
    """Return warnings about special tokens in a prompt by mistake, in the same words for all, to be counted."""
    if tokens[-1] == tokenizer.eos_token_id:
        yield (
            f"the prompt ends with {tokenizer.eos_token!r}, after which a model expects no text: leave it out of "
            "the text, the chat template, or what the post_processor in tokenizer.json adds"
        )
    messages = "" if isinstance(content, str) else str(content)
    for special in (tokenizer.bos_token, tokenizer.eos_token):
        if special and special in messages:
            yield (
                f"a message holds {special!r}, so a chat template may have been applied before: use the original "
                "messages, or set data.apply_chat_template=false"
            )


def hidden_token_warnings(reward: Reward, tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Return warnings about reward functions whose source names special tokens that responses come without."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special -= set(tokenizer.special_tokens_map.values())
    for spec in reward.weights if reward.skip_special_tokens else ():
        file = parse_spec(spec).file
        source = Path(file).read_text("utf-8", "replace") if file else ""
        if named := ", ".join(sorted(token for token in special if token in source)):
            yield (
                f"{spec} gets responses without special tokens, but {file} names {named}: set "
                "reward.skip_special_tokens=false"
            )
