"""Checks of prompts: their records, tokens and special tokens, and whether the tokenizer keeps their text.

Several ranks check parts of a file; their results are merged and reported once.
"""

import sys
import unicodedata
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from megappo.config.config_error import shorten
from megappo.config.schema import Reward
from megappo.data.chat import PromptContent
from megappo.data.records import Records
from megappo.data.tokenizer import special_tokens
from megappo.userland.spec import parse_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_LENGTHS = 3
"""Lengths of too long prompts up to which each is an error of its own."""
RECORDS_AT_ONCE = 1000
"""Records whose texts a check holds at once."""
READ_AT_ONCE = 16
"""Records that a check reads at once; each may hold images."""
COMPARED = 100
"""Records of a file whose tokens are decoded, and compared with the tokens that tokenizer.json gives."""
MAX_FAULTS = 10
"""Different faults of a file that are reported; the records with others are counted."""
MAX_NAMED = 3
"""Records named for one fault."""
OTHER_FAULTS = "wrong in other ways"
OTHER_TOKENS = (
    "the {} has other tokens by tokenizer.json alone than with tokenizer_config.json: make both agree (added "
    "tokens, split_special_tokens), as the tokenizer's save_pretrained does"
)
LOST_TEXT = (
    "the tokenizer loses at least half of the {0}'s characters: use a model made for such text, or write {0}s in "
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
        ranks: numbers by which the records are ordered, NaN for faulty ones; empty without data.order_by.
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
            key: key of the config that names the file.
        """
        numbers: dict[str, list[int]] = {}
        for fault in self.faults:
            if fault.action == action:
                is_known = fault.text in numbers or len(numbers) < MAX_FAULTS
                text = fault.text if is_known else OTHER_FAULTS
                numbers.setdefault(text, []).append(fault.number + 1)
        for text, at in numbers.items():
            unit = f"{file.unit}s" if len(at) > 1 else file.unit
            places = ", ".join(map(str, at[:MAX_NAMED]))
            if len(at) > MAX_NAMED:
                places += f" and {len(at) - MAX_NAMED:,} more"
            fields = ""
            if text.startswith("no field"):
                fields = f"; the file has: {shorten(', '.join(file.fields))}"
            yield f"{key}: {file.path} {unit} {places}: {text}{fields}"


def merge_checks(parts: Sequence[Check]) -> Check:
    """Merge the checks of parts of a file; its faults are in the order of the file."""
    whole = Check()
    for part in parts:
        whole.num_checked += part.num_checked
        whole.faults += part.faults
        whole.ranks.extend(part.ranks)
    whole.faults.sort(key=attrgetter("number"))
    return whole


def loses_text(text: str, tokens: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether at least half of a text's characters are missing from its decoded tokens.

    Blanks, case, accents and compatibility forms do not count, as a tokenizer may normalise them.
    """
    decoded = tokenizer.decode(tokens)
    if tokenizer.unk_token:
        decoded = decoded.replace(tokenizer.unk_token, "")
    before = _letters(text)
    after = _letters(decoded)
    lost = (before - after).total()
    return lost > 0 and 2 * lost >= before.total()


def _letters(text: str) -> Counter[str]:
    letters = unicodedata.normalize("NFKD", text.casefold())
    return Counter(letter for letter in letters if not (letter.isspace() or unicodedata.combining(letter)))


def end_warnings(tokens: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Return a warning about a prompt that ends with the end token, in the same words for all, to be counted."""
    if tokens[-1] == tokenizer.eos_token_id:
        yield (
            f"the prompt ends with {tokenizer.eos_token!r}, after which a model expects no text: leave it out of "
            "the text, the chat template, or what the post_processor in tokenizer.json adds"
        )


def message_warnings(content: PromptContent, specials: Collection[str]) -> Iterator[str]:
    """Return warnings about special tokens in messages by mistake, in the same words for all, to be counted."""
    messages = "" if isinstance(content, str) else str(content)
    for special in sorted(specials):
        if special in messages:
            yield (
                f"a message holds {special!r}, so a chat template may have been applied before: use the original "
                "messages, or set data.apply_chat_template=false"
            )


def hidden_token_warnings(reward: Reward, tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Return warnings about reward functions whose source names special tokens that responses come without."""
    special = special_tokens(tokenizer) - set(tokenizer.special_tokens_map.values())
    for spec in reward.weights if reward.skip_special_tokens else ():
        file = parse_spec(spec).file
        source = Path(file).read_text("utf-8", "replace") if file else ""
        if named := ", ".join(sorted(token for token in special if token in source)):
            yield (
                f"{spec} gets responses without special tokens, but {file} names {named}: set "
                "reward.skip_special_tokens=false"
            )
