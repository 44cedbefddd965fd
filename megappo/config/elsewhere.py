"""Keys of verl, TRL and OpenRLHF with ours beside them (elsewhere.yaml): for `megappo import`, for errors about unknown
keys and values, and for docs/coming_from.md."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import yaml

from megappo.config.config_error import show

TABLE = Path(__file__).with_name("elsewhere.yaml")
BELOW = ".*"
"""Ending of a row for all keys below one."""
OLD_PREFIX = "actor_rollout_ref."
"""verl's section around the ones that it shares with this project."""


@dataclass(frozen=True)
class TheirKey:
    """A key of another system; elsewhere.yaml describes the fields."""

    key: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    others: bool = False
    computed: str = ""
    note: str = ""
    missing: str = ""

    @property
    def is_renamed(self) -> bool:
        """True if a setting alone gives the value of our key."""
        return bool(self.key) and not (self.computed or self.note or self.missing)

    def translated(self, value: Any) -> Any:
        """Return our value for one of theirs, where the row has values; None if it is our default, or has none."""
        return next((ours for theirs, ours in self.values.items() if theirs == value), value if self.others else None)

    def remedy(self, name: str, value: Any) -> str:
        """Return what to do with a setting of this row, to follow an error.

        Args:
            name: name of its key, with its system.
        """
        if self.missing or self.note:
            kind = "has no counterpart" if self.missing else "is not needed"
            return f"{name} {kind} ({self.missing or self.note}): drop it"
        if self.computed:
            return f"write {self.key} for {name} ({self.computed})"
        ours = self.translated(value) if self.values else value
        if ours is None and value in list(self.values):
            return f"{name} {show(value)} is the default here: drop it"
        return (
            f"write {self.key}{'' if ours is None else f'={ours if isinstance(ours, str) else show(ours)}'} for {name}"
        )


@dataclass(frozen=True)
class System:
    """Another system; elsewhere.yaml describes the other fields.

    Attributes:
        program: regular expression of the word of a command before the settings of its training.
        aliases: older names of its keys.
    """

    title: str
    rows: Mapping[str, TheirKey]
    formulas: Mapping[str, str]
    defaults: Mapping[str, Mapping[str, Any]]
    program: str
    method: str = "''"
    aliases: Mapping[str, str] = field(default_factory=dict)

    def find(self, key: str) -> tuple[str, TheirKey | None]:
        """Return the name under which the table has a key, or one above it with .*, and its row, if any."""
        sections = list(accumulate(key.split(".")[:-1], "{}.{}".format))
        names = [key, *(section + BELOW for section in reversed(sections))]
        found = next(filter(self.rows.__contains__, names), key)
        row = self.rows.get(found)
        if row is not None and row.is_renamed:
            row = replace(row, key=row.key + key.removeprefix(found.removesuffix(BELOW)))
        return found, row


@cache
def systems() -> dict[str, System]:
    """Return the other systems by the name that `megappo import` takes."""
    table = yaml.safe_load(TABLE.read_text("utf-8"))
    for fields in table.values():
        fields["rows"] = {
            "".join(parts): TheirKey(row) if isinstance(row, str) else TheirKey(**row)
            for key, row in fields["rows"].items()
            for parts in product(*(part.split(",") for part in re.split("[{}]", key)))
        }
    return {name: System(**fields) for name, fields in table.items()}


def key_advice(key: str, value: Any, sections: Collection[str]) -> tuple[str, str]:
    """Return the system that has a key which is not ours, and what to do; "" for both if none has it.

    Args:
        sections: our sections. A key in one of them that a system covers by .* alone is more likely misspelt.
    """
    for command, system in systems().items():
        for name in (key, OLD_PREFIX + key, system.aliases.get(key, key)):
            found, row = system.find(name)
            above = found.removesuffix(BELOW).removeprefix(name.removesuffix(key))
            if row is not None and above not in sections:
                return command, row.remedy(f"{system.title}'s {name}", value)
    return "", ""


def value_advice(key: str, value: object) -> str:
    """Return our value for another system's value of one of our keys, to follow an error; "" if no system has it."""
    for system in systems().values():
        for row in system.rows.values():
            if row.key == key and isinstance(value, str) and value in row.values:
                ours = "the default" if row.values[value] is None else row.values[value]
                return f" ({system.title}'s {value} is {ours} here)"
    return ""
