"""Records of data files as prompts: the fields a run reads, checked, chat messages rendered, texts as tokens."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megappo.config.schema import Reward
from megappo.data.chat import Chat, PromptContent
from megappo.data.tokenizer import encode
from megappo.userland.signatures import PROMPTS, InputSpec
from megappo.userland.spec import check_label

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_NESTING = 100
"""Lists and objects within each other; Python's own limits, in reading, writing and passing on, are higher."""
MAX_NAMES = 200
"""Characters of a list of field names in messages."""
NO_REWARD = Reward(function=None)


@dataclass(frozen=True)
class RequiredField:
    """A field that every record must have.

    Attributes:
        key: of the config, that requires it.
        name: may be dotted, see `look_up`.
        remedy: what to do where a file lacks it.
    """

    key: str
    name: str
    remedy: str

    @property
    def fault(self) -> str:
        """Fault of a record without it."""
        return f"no field {self.name!r} ({self.key})"


@dataclass(frozen=True)
class RecordFields:
    """Fields that a run reads of each record.

    Attributes:
        takes: fields of the reward function and the environment.
        section: of the config, with the keys of these files.
        order_by: see data.order_by.
        reward: the section with the functions that get the label.
    """

    prompt_key: str
    label_key: str
    takes: InputSpec
    section: str = "data"
    order_by: str | None = None
    reward: Reward = NO_REWARD

    @cached_property
    def required(self) -> tuple[RequiredField, ...]:
        """Prompt, label, the field to order by, and the needs of reward function and environment."""
        section, by_environment = self.section, self.takes.by_environment
        keys = {f"{section}.prompt_key": self.prompt_key, f"{section}.label_key": self.label_key}
        if self.order_by is not None:
            keys["data.order_by"] = self.order_by.removeprefix("-")
        found = [RequiredField(key, name, f"set {key}") for key, name in keys.items()]
        function, environment = "reward.function", "rollout.environment"
        remedy = "correct its columns, or add the field"
        if section != "data":
            function, environment = f"{section}.reward", f"{section}.environment"
            remedy += ", or set that to none, or another one"
        for name in self.takes.needed:
            if name not in by_environment:
                found.append(RequiredField(function, name, "rename its parameter, give it a default, or add the field"))
        return *found, *(RequiredField(environment, name, remedy) for name in by_environment)

    @property
    def names(self) -> Sequence[str] | None:
        """All fields that may be read; None: any."""
        if self.takes.optional is None:
            return None
        return [*(field.name for field in self.required), *self.takes.optional]

    def rank_of(self, value: Any) -> float:
        """Return the number by which a record with this value of order_by is ordered, ascending.

        Raises:
            ValueError: the value is no number.
        """
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"expected a number for data.order_by, found {repr(value)[:80]}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError("the number for data.order_by is too large, or none")
        return -number if str(self.order_by).startswith("-") else number

    def columns_of(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a record for the reward function; if it takes any field, all but the prompt."""
        others = self.takes.optional
        if others is None:
            others = tuple(name for name in record if name != self.prompt_key)
        return {name: record[name] for name in (*self.takes.needed, *others) if name in record}


def look_up(fields: Mapping[str, Any], name: str, within: str = "") -> Any:
    """Return the value of the field of this very name, else of the objects that the names between its dots lead to.

    Args:
        within: the dotted name of `fields`.
    Raises:
        LookupError: there is none; the message has how far it got.
    """
    if name in fields:
        return fields[name]
    first, dot, rest = name.partition(".")
    if not dot or first not in fields:
        raise LookupError(f", as {within!r} has only {listed(fields)}" if within else "")
    path = f"{within}.{first}".lstrip(".")
    if not isinstance(fields[first], Mapping):
        raise LookupError(f", as {path!r} is no object")
    return look_up(fields[first], rest, path)


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Join names with commas, up to MAX_NAMES characters."""
    text = ", ".join(names) or "none"
    return text if len(text) <= MAX_NAMES else f"{text[:MAX_NAMES]}..."


@dataclass(frozen=True)
class PromptEntry:
    """Text and label of a record.

    Attributes:
        text: as the model sees it.
        content: the text or messages it was made from.
        columns: further fields for the reward function.
        rank: by which it is ordered.
        left_out: reasons why fields that no function requests by name are not in columns.
    """

    text: str
    content: PromptContent
    label: Any
    columns: dict[str, Any]
    rank: float = 0.0
    left_out: tuple[str, ...] = ()

    @property
    def is_chat(self) -> bool:
        """True if the chat template made the text, with the special tokens in it."""
        return not isinstance(self.content, str)


def entry_of(record: Any, fields: RecordFields, chat: Chat) -> PromptEntry:
    """Return the entry of a record.

    Raises:
        ValueError: it has none; each argument is a fault.
    """
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, found {type(record).__name__}")
    values, missing = [], []
    for field in fields.required:
        try:
            values.append(look_up(record, field.name))
        except LookupError as reached:
            missing.append(f"{field.fault}{reached}")
    if missing:
        raise ValueError(*missing)
    prompt, label, *more = values
    rank = 0.0 if fields.order_by is None else fields.rank_of(more[0])
    _check_value("prompt", prompt)
    _check_value("label", label)
    check_label(label, fields.reward.weights)
    columns, left_out = _checked_columns(record, fields)
    content = chat.content_of(prompt)
    if fields.takes.raw_prompts:
        columns[PROMPTS] = content
    return PromptEntry(chat.text_of(content), content, label, columns, rank, left_out)


def _checked_columns(record: Mapping[str, Any], fields: RecordFields) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the columns that are JSON, and why others are left out.

    Raises:
        ValueError: a column that a function requests by name is not JSON.
    """
    columns, left_out = {}, []
    for name, value in fields.columns_of(record).items():
        try:
            _check_value(f"field {name!r}, which reward.function takes,", value)
            columns[name] = value
        except ValueError as error:
            if fields.takes.optional is not None or name in fields.takes.needed:
                raise
            left_out.append(f"{error}, or do without: it is left out")
    return columns, tuple(left_out)


def tokens_of(entries: Sequence[PromptEntry], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Tokenise entries; one BOS where both the text (from a chat template) and the tokenizer add one."""
    two_bos = [tokenizer.bos_token_id] * 2
    tokens: list[list[int]] = [[]] * len(entries)
    for is_chat in (False, True):
        places = [place for place, entry in enumerate(entries) if entry.is_chat == is_chat]
        texts = [entries[place].text for place in places]
        for place, ids in zip(places, encode(texts, tokenizer, special=not is_chat), strict=True):
            tokens[place] = ids[1:] if ids[:2] == two_bos else ids
    return tokens


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def _check_value(name: str, value: Any) -> None:
    """Raise ValueError for a value that cannot be tokenised, passed to another process or written as JSON."""
    too_deep = f"the {name} is nested more than {MAX_NESTING} deep: flatten it, or write it as text"
    try:
        text = value if isinstance(value, str) else _ENCODER.encode(value)
        text.encode()
    except RecursionError:
        raise ValueError(too_deep) from None
    except UnicodeEncodeError as error:
        found = error.object[error.start]
        raise ValueError(f"the {name} holds {found!a}, half of a character: write both halves") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"the {name} is not JSON ({error}): convert it to text or a number") from None
    if text is not value and text.count("[") + text.count("{") > MAX_NESTING and _nesting(value) > MAX_NESTING:
        raise ValueError(too_deep)


def _nesting(value: Any) -> int:
    """Count the lists and objects within each other."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth
