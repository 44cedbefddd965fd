"""The error of a run that cannot start as configured, and the texts that such errors are made of."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel

from megappo.errors import EXIT_CONFIG, ActionableError, escaped

Errors = Iterator[str]
"""Messages of errors: the thing, what was expected, what was found, and the remedy."""
LONGEST_VALUE = 80
"""Characters of a wrong value that an error repeats."""
LONGEST_ERROR = 1000
"""Characters of an error; the middle of a longer one (it may repeat a path of thousands) is left out."""
MOST_ERRORS = 50
"""Errors that are listed; the rest is counted."""
LARGEST_DIVISOR = 10**6
"""Advice names no larger one."""


class ConfigError(ActionableError, ValueError):
    """Everything wrong with a config, found together.

    Attributes:
        errors: one printable line each, with the key, its value, what was expected and the remedy.
    """

    exit_code = EXIT_CONFIG

    def __init__(self, *errors: str):
        rest = len(errors) - MOST_ERRORS
        more = (f"{counted(rest, 'more error')}: correct the first ones",) if rest > 1 else errors[MOST_ERRORS:]
        self.errors = tuple(map(printable, (*errors[:MOST_ERRORS], *more)))
        super().__init__("\n".join(self.errors))

    def report(self, rank: int) -> str:
        """Return a line for each error. All ranks find the same, so none is named."""
        return "\n".join(f"error: {line}" for line in self.errors)


class Missing(str):
    """An error about a file that is not here, in a config that may be right. `megappo plan --ignore-missing` prints a
    warning in its place."""


class Downloadable(Missing):
    """An error about a model that a run downloads; `megappo plan` prints a warning in its place, too, unless it has
    tried the download."""


def printable(text: str) -> str:
    """Return the text on one line that any terminal shows as it is: unprintable characters are escaped, and the middle
    of a long text is left out."""
    if len(text) > LONGEST_ERROR:
        end = LONGEST_ERROR // 2
        text = f"{text[:end]} ... {text[-end:]}"
    return escaped(text)


def shorten(text: str) -> str:
    """Return the text as an error repeats it."""
    return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."


def listed(names: Iterable[str]) -> str:
    """Return names as an error lists them; "none" for none."""
    return shorten(", ".join(names) or "none")


def show(value: object) -> str:
    """Return a value as a message or an override writes it."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value, ensure_ascii=False, default=str)


def counted(count: int, noun: str) -> str:
    """Return `1 rank`, `2 ranks`, `3 processes`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def looked_in(path: str | Path) -> str:
    """Return the folder in which a missing relative path was searched, to follow it in an error."""
    return "" if Path(path).is_absolute() else f" (looked in {Path.cwd()})"


def nearest_divisors(number: int, size: int) -> str:
    """Return the divisors of `number` just below and above `size`, for advice."""
    divisors = [one for one in range(1, min(number, LARGEST_DIVISOR) + 1) if number % one == 0]
    below = [one for one in divisors if one < size]
    above = [one for one in divisors if one > size]
    return " or ".join(map(str, below[-1:] + above[:1]))
