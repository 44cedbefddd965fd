"""The fields of a data file's records that a run reads: prompt, label, and those that the reward function takes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megappo.config.schema import Reward
from megappo.userland.forms import Takes

MAX_VALUE = 80
"""Characters of a value, in messages."""
NO_REWARD = Reward(function=None)
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
    """What a run reads of each record.

    Attributes:
        takes: of the reward function.
        section: of the config, where the keys of these files stand.
        order_by: see data.order_by.
        reward: whose functions get the label.
    """

    prompt_key: str
    label_key: str
    takes: Takes
    section: str = "data"
    order_by: str | None = None
    reward: Reward = NO_REWARD

    @cached_property
    def wanted(self) -> tuple[Wanted, ...]:
        """Those that every record must have: prompt, label, what reward function and environment need."""
        keys = {f"{self.section}.prompt_key": self.prompt_key, f"{self.section}.label_key": self.label_key}
        if self.order_by is not None:
            keys["data.order_by"] = self.order_by.removeprefix("-")
        of_function = "reward.function" if self.section == "data" else f"{self.section}.reward"
        remedy = "rename its parameter, give it a default, or add the field"
        environment, of_environment = "rollout.environment", self.takes.by_environment
        of_columns = "correct its columns, or add the field"
        if self.section != "data":
            environment = f"{self.section}.environment"
            of_columns += ", or set that to none, or another one"
        return (
            *(Wanted(key, name, f"set {key}") for key, name in keys.items()),
            *(Wanted(of_function, name, remedy) for name in self.takes.needed if name not in of_environment),
            *(Wanted(environment, name, of_columns) for name in of_environment),
        )

    @property
    def names(self) -> Sequence[str] | None:
        """All that may be asked for; None: any."""
        if self.takes.welcome is None:
            return None
        return [*(wanted.name for wanted in self.wanted), *self.takes.welcome]

    def rank_of(self, value: Any) -> float:
        """By which a record is ordered, ascending, when its field of order_by has this value.

        Raises:
            ValueError: that is no number.
        """
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"expected a number for data.order_by, found {repr(value)[:MAX_VALUE]}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError("the number for data.order_by is too large, or none")
        return -number if str(self.order_by).startswith("-") else number

    def columns_of(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """What the reward function takes of it; where that is any field, all but the prompt."""
        needed, welcome = self.takes.needed, self.takes.welcome
        others = [name for name in record if name != self.prompt_key] if welcome is None else welcome
        return {name: record[name] for name in (*needed, *others) if name in record}


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


def columns_for(names: Sequence[str] | None, columns: Sequence[str]) -> list[str]:
    """Of a table's columns those that fields of these names are in; None: any."""
    if names is None:
        return list(columns)
    holders = [name if name in columns else name.partition(".")[0] for name in names]
    return [name for name in dict.fromkeys(holders) if name in columns]


def listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Names with commas, not too many."""
    text = ", ".join(names) or "none"
    return text if len(text) <= MAX_NAMES else f"{text[:MAX_NAMES]}..."
