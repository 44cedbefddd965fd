"""What is to be scored, and in what pieces workers are called with it."""

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple, Protocol

from megappo.userland.builtin import BUILTIN, WAITING
from megappo.userland.forms import Graded, Rows, Way
from megappo.userland.process import Failed

PIECE_SECONDS = 0.05
"""How long a worker may be busy with a piece of several rows, behind each other, as far as the rows before tell."""
MOST_ROWS = 64
"""Of a piece."""
MOST_ALONE = 3
"""Rows of a call that are waited for, one after the other, where none has a score."""
MAX_SHOWN = 200
"""Characters of a text in a message."""


class Row(NamedTuple):
    """A response, and what reward functions may see of where it comes from.

    Attributes:
        columns: what they take of its record beside prompt and label, as JSON.
        name: of its record, for messages.
    """

    prompt: str
    response: str
    label: Any
    columns: Mapping[str, Any]
    name: str = ""


class Workers(Protocol):
    """What has rows scored."""

    def put(self, units: Sequence["Unit"]) -> None: ...

    def put_shares(self, units: Sequence["Unit"]) -> None: ...

    def wait_for(self, scoring: "Scoring") -> None: ...

    def check(self) -> None: ...


class Unit(NamedTuple):
    """A row, the `index`th of its scoring, for one function."""

    scoring: "Scoring"
    index: int

    @property
    def row(self) -> Row:
        return self.scoring.rows[self.index]


@dataclass
class Retry:
    """The rows of a call that has failed, each asked about alone.

    Attributes:
        since: when the call failed.
    """

    since: float
    num_failed: int = 0
    has_scored: bool = False

    def is_hopeless(self, seconds: float) -> bool:
        """Whether rows that have failed say that the function does, not they; those of one call take `seconds`."""
        return not self.has_scored and self.num_failed >= MOST_ALONE and time.monotonic() >= self.since + seconds


class Piece(NamedTuple):
    """What a worker calls a function with.

    Attributes:
        retry: that it is of.
    """

    function: int
    units: Sequence[Unit]
    retry: Retry | None = None


class Scoring:
    """Rows that are added as they come, and what all functions together find of each. Of `RewardPool.begin`.

    Attributes:
        failure: what went wrong first without ending the run, and of which rows; "" if nothing did.
        num_errors, num_timeouts: rows of which a function has found nothing.
        num_left: how many results of functions are still to come, of what they have been asked.
    """

    def __init__(self, workers: "Workers", functions: Sequence[str]):
        self.rows: list[Row] = []
        self.failure = ""
        self.num_errors = self.num_timeouts = 0
        self.num_left = 0
        self._workers = workers
        self._functions = functions
        self._found: list[list[Graded | Failed | None]] = []
        self._has_ended = False

    def add(self, rows: Sequence[Row]) -> None:
        """Have them scored; workers may begin at once."""
        first = len(self.rows)
        self.rows += rows
        self._found += [[None] * len(self._functions) for _ in rows]
        if rows:
            self._workers.put([Unit(self, index) for index in range(first, len(self.rows))])

    def end(self) -> None:
        """Say that all rows are there: functions that get a share of all may begin."""
        if self.rows and not self._has_ended:
            self._workers.put_shares([Unit(self, index) for index in range(len(self.rows))])
        self._has_ended = True

    def results(self) -> list[Graded]:
        """Of each row, in order, once all have been added; waits for them. One that failed has no scores.

        Raises:
            RewardError: a function failed, and reward.on_error is raise, or the workers are gone.
        """
        self.end()
        self._workers.wait_for(self)
        failed = list(filter(None, map(_failed, self._found)))
        self.num_timeouts = sum(one.is_late for one in failed)
        self.num_errors = len(failed) - self.num_timeouts
        return self._graded(self._found)

    def known(self, indices: range) -> list[Graded] | None:
        """Of these rows alone, if all of it is there by now.

        Raises:
            RewardError: as of `results`.
        """
        found = self._found[indices.start : indices.stop]
        if any(one is None for of_row in found for one in of_row):
            self._workers.check()
            return None
        return self._graded(found)

    def _graded(self, found: Sequence[Sequence[Any]]) -> list[Graded]:
        several = _told_by_several(found)
        return [_together(of_row, self._functions, several) for of_row in found]

    def settle(self, unit: Unit, function: int, found: Graded | Failed) -> None:
        """Note what a function has found of a row."""
        self._found[unit.index][function] = found
        self.num_left -= 1


def _told_by_several(rows: Sequence[Sequence[Any]]) -> set[str]:
    """The names of parts that more than one function has told."""
    of_functions = zip(*rows, strict=True)
    told = Counter(chain.from_iterable({name for one in found for name in _parts(one)} for found in of_functions))
    return {name for name, count in told.items() if count > 1}


def _failed(of_functions: Sequence[Any]) -> Failed | None:
    return next((one for one in of_functions if isinstance(one, Failed)), None)


def _parts(found: Any) -> Mapping[str, float]:
    return found.parts if isinstance(found, Graded) else {}


def _together(of_functions: Sequence[Any], names: Sequence[str], told_by_several: Set[str]) -> Graded:
    if _failed(of_functions) is not None:
        return Graded([], {}, failed=True)
    if len(of_functions) == 1 and not of_functions[0].steps:  # of most runs, every row
        return of_functions[0]
    scores = [score for one in of_functions for score in one.scores]
    answer = next((one.answer for one in of_functions if one.answer is not None), None)
    weights = [one.loss_weight for one in of_functions if one.loss_weight is not None]
    steps = [of_score for one in of_functions for _, of_score in zip_longest(one.scores, one.steps, fillvalue=())]
    parts = {
        f"{function}/{name}" if name in told_by_several else name: part
        for function, one in zip(names, of_functions, strict=True)
        for name, part in one.parts.items()
    }
    return Graded(
        scores, parts, answer, loss_weight=math.prod(weights) if weights else None, steps=steps if any(steps) else ()
    )


@dataclass
class Lane:
    """Rows that wait for a function which is called with them as they come.

    Attributes:
        most: rows of a piece.
        is_timed: a piece is to take PIECE_SECONDS at most.
    """

    most: int
    is_timed: bool
    waiting: deque[Unit] = field(default_factory=deque)
    _seconds: float = 0.0
    _num_rows: int = 0

    def take(self, num_workers: int) -> list[Unit]:
        """The next rows for one of so many workers: few enough that others get some, too, and soon done."""
        size = min(self.most, math.ceil(len(self.waiting) / num_workers))
        if self.is_timed:
            size = min(size, int(PIECE_SECONDS * self._num_rows / self._seconds) if self._seconds else 1)
        return [self.waiting.popleft() for _ in range(max(1, size))]

    def took(self, num_rows: int, seconds: float) -> None:
        """Note how long rows have taken."""
        self._num_rows += num_rows
        self._seconds += seconds


def lane(way: Way, batch_size: int | None, spec: str) -> Lane | None:
    """Of a function; None if it gets a worker's share of all rows in one call, when the last is there."""
    if way == "rows" or spec in WAITING:
        return Lane(MOST_ROWS, is_timed=False)
    if way == "row" or spec in BUILTIN:  # these judge each row by itself
        return Lane(MOST_ROWS, is_timed=True)
    return Lane(batch_size, is_timed=False) if batch_size is not None else None


def shares(units: Sequence[Unit], num_workers: int) -> list[Sequence[Unit]]:
    """Equal parts."""
    count = min(num_workers, len(units))
    return [units[len(units) * i // count : len(units) * (i + 1) // count] for i in range(count)]


def rows_of(units: Sequence[Unit]) -> Rows:
    """As workers are told of them."""
    rows = [unit.row for unit in units]
    return Rows(
        prompts=[row.prompt for row in rows],
        responses=[row.response for row in rows],
        labels=[row.label for row in rows],
        columns=[dict(row.columns) for row in rows],
    )


def shown(units: Sequence[Unit]) -> str:
    """Which rows they are, for a message."""
    row = units[0].row
    count = f"{len(units)} responses, of which the first is" if len(units) > 1 else "response"
    record = f" ({row.name})" if row.name else ""
    return f"it was scoring {count} {_cut(row.response)} to prompt {_cut(row.prompt)}{record}"


def _cut(text: str) -> str:
    return repr(text) if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]!r}... ({len(text)} characters)"
