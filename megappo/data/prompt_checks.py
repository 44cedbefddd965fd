"""Checks of prompts: their records, tokens and special tokens, and whether the tokenizer keeps their text."""

import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.config.config_error import shorten
from megappo.config.schema import Data, Reward
from megappo.data.chat import Chat, PromptContent
from megappo.data.entries import PromptEntry, RecordFields, entry_of, tokens_of
from megappo.data.faults import Action, Check
from megappo.data.records import Records
from megappo.data.token_bounds import TokenBounds
from megappo.data.tokenizer import ids_by_file
from megappo.runtime.heartbeat import heartbeat
from megappo.userland.spec import parse_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECORDS_AT_ONCE = 1000
DECODED = 1000
"""Records of a file whose tokens are decoded, where they may have lost text: it takes as long as all other checks."""
COMPARED = 100
"""Records of a file whose tokens are compared with those that tokenizer.json gives."""
OTHER_TOKENS = (
    "the prompt has other tokens by tokenizer.json alone than with tokenizer_config.json: make both agree (added "
    "tokens, split_special_tokens), as the tokenizer's save_pretrained does"
)


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
        self._on_bad_row: Action = "skip" if config.on_bad_row == "skip" else "bad_row"
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._bounds = TokenBounds(tokenizer)
        self._may_lose_text = self._bounds.at_most("") == math.inf
        self._all_embedded = max(tokenizer.get_vocab().values()) < vocab_size

    def check(self, records: Records, numbers: Sequence[int]) -> Check:
        """Check the records of these numbers, from 0; of texts that the tokenizer loses, note the first."""
        check = Check(len(numbers))
        for start in range(0, len(numbers), RECORDS_AT_ONCE):
            heartbeat.beat()
            part = numbers[start : start + RECORDS_AT_ONCE]
            entries: dict[int, PromptEntry] = {}
            for number, record in zip(part, records.at(part), strict=True):
                try:
                    entries[number] = entry_of(record, self._fields, self._chat)
                    check.add(number, entries[number].left_out, "warn")
                except ValueError as error:
                    check.add(number, error.args, self._on_bad_row)
            if self._fields.order_by is not None:
                check.ranks.extend(entries[number].rank if number in entries else math.nan for number in part)
            for number, fault, action in self._token_faults(entries):
                if action != "lost" or action not in check.found:
                    check.add(number, [fault], action)
        return check

    def _token_faults(self, entries: Mapping[int, PromptEntry]) -> Iterator[tuple[int, str, Action]]:
        """Return prompts with no, too many or unknown tokens, and the action. An unknown token is always an error: the
        tokenizer is wrong. Texts whose length suffices to decide are not tokenised."""
        limit, too_long = self._config.max_prompt_length, self._config.too_long
        undecided = {}
        for number, entry in entries.items():
            fewest = self._bounds.at_least(entry.text)
            if fewest > limit and (self._all_embedded or too_long != "truncate_left"):
                yield number, self._too_long(f"{len(entry.text):,} characters, so at least {fewest:,}"), too_long
            elif self._bounds.at_most(entry.text) > limit or not self._all_embedded or number < COMPARED:
                undecided[number] = entry
        tokenised = tokens_of(list(undecided.values()), self._tokenizer)
        for (number, entry), tokens in zip(undecided.items(), tokenised, strict=True):
            if len(tokens) > limit:
                yield number, self._too_long(f"{len(tokens)}"), too_long
            if tokens:
                for fault, action in self._faults_of(number, entry, tokens):
                    yield number, fault, action
            else:
                yield number, "the prompt is empty: it has no token", self._on_bad_row

    def _faults_of(self, number: int, entry: PromptEntry, tokens: list[int]) -> Iterator[tuple[str, Action]]:
        limit = self._config.max_prompt_length
        is_used = len(tokens) <= limit or self._config.too_long == "truncate_left"
        if is_used and (largest := max(tokens[-limit:])) >= self._vocab_size:
            yield (
                (
                    f"the prompt has token {largest}, for which a model has no embedding (the smallest vocab_size in "
                    f"config.json is {self._vocab_size}): drop it, or use the tokenizer that belongs to the model"
                ),
                "error",
            )
        if self._may_lose_text and number < DECODED:
            decoded = self._tokenizer.decode(tokens)
            if lost := lost_text(entry.text, decoded, self._tokenizer.unk_token):
                yield lost, "lost"
        if number < COMPARED:
            by_file = ids_by_file(entry.text, self._tokenizer, special=not entry.is_chat) or tokens
            if by_file[-len(tokens) :] != tokens:
                yield OTHER_TOKENS, "error"
            for warning in special_token_warnings(entry.content, tokens, self._tokenizer):
                yield warning, "warn"

    def _too_long(self, found: str) -> str:
        limit = f"{self._fields.section}.max_prompt_length {self._config.max_prompt_length}"
        if self._config.too_long != "error":
            return f"the prompt has more tokens than {limit}"  # the same for all, which are counted together
        return f"the prompt has {found} tokens, more than {limit}: raise it, drop this, or set data.too_long"


def lost_text(text: str, decoded: str, unknown: str | None) -> str:
    """Return a fault if at least half of a text's characters are missing from its decoded tokens; else "".

    Blanks, case, accents and compatibility forms do not count, as a tokenizer may normalise them.

    Args:
        decoded: the text's tokens, decoded, with the special ones that a chat template may have brought.
        unknown: the token for text that the tokenizer does not know.
    """
    before, after = _letters(text), _letters(decoded.replace(unknown, "") if unknown else decoded)
    lost = (before - after).total()
    if not lost or 2 * lost < before.total():
        return ""
    return (
        f"the tokenizer loses {lost} of the {before.total()} characters, blanks aside, of {shorten(repr(text))}: the "
        f"model sees {shorten(repr(decoded))}"
    )


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
