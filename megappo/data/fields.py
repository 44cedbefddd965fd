"""The fields of a data file's records that a run reads: prompt and label."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MAX_NAMES = 200
"""Characters of the fields that a file or an object has, in messages."""


@dataclass(frozen=True)
class Wanted:
    """A field that every record must have.

    Attributes:
        key: of the config, by which it is wanted.
        name: may be dotted, see `look_up`.
        remedy: what to do where a file lacks it.
    """

    key: str
    name: str
    remedy: str

    @property
    def fault(self) -> str:
        """Of a record without it."""
        return f"no field {self.name!r} ({self.key})"


@dataclass(frozen=True)
class Fields:
    """What a run reads of each record."""

    prompt_key: str
    label_key: str

    @cached_property
    def wanted(self) -> tuple[Wanted, ...]:
        """Those that every record must have: prompt and label."""
        keys = {"data.prompt_key": self.prompt_key, "data.label_key": self.label_key}
        return tuple(Wanted(key, name, f"set {key}") for key, name in keys.items())

    @property
    def names(self) -> Sequence[str]:
        """All that may be asked for."""
        return [wanted.name for wanted in self.wanted]


def look_up(fields: Mapping[str, Any], name: str, within: str = "") -> Any:
    """The value of a field: of one of this very name, else of the objects that the names between its dots lead to.

    Args:
        within: where `fields` are, the same way.
    Raises:
        LookupError: there is none; says how far it got, if it got anywhere.
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


def columns_for(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Of a table's columns those that fields of these names are in."""
    holders = [name if name in columns else name.partition(".")[0] for name in names]
    return [name for name in dict.fromkeys(holders) if name in columns]


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Names with commas, not too many."""
    text = ", ".join(names) or "none"
    return text if len(text) <= MAX_NAMES else f"{text[:MAX_NAMES]}..."
