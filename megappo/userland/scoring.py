"""Rows to score: their grades as far as they are there, and the work items that workers get."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from megappo.userland.grades import Graded, combined
from megappo.userland.signatures import CallMode, Row
from megappo.userland.spec import BUILTIN, WAITING
from megappo.userland.worker_process import CallError

if TYPE_CHECKING:
    from megappo.userland.rewards import RewardPool

MAX_ROWS = 64
"""Most rows of a work item, unless they must be scored together."""
SPREAD = 4
"""A worker gets at most such a part of its share of the waiting rows at once."""
MAX_LATE_ALONE = 3
"""Rows of a call that may be late one after the other, each called alone, while none of the call has a score."""
MAX_SHOWN = 200
"""Characters of a text in a message."""


class RowReference(NamedTuple):
    """A row, the `index`th of its scoring."""

    scoring: "Scoring"
    index: int

    @property
    def row(self) -> Row:
        return self.scoring.rows[self.index]


@dataclass
class Retry:
    """The rows of a call that has failed, each called alone."""

    num_late: int = 0
    has_scored: bool = False

    @property
    def is_hopeless(self) -> bool:
        """The function fails, whatever the row."""
        return not self.has_scored and self.num_late >= MAX_LATE_ALONE


class WorkItem(NamedTuple):
    """Rows for a worker to call a function with."""

    function: int
    rows: Sequence[RowReference]
    retry: Retry | None = None


@dataclass
class RowQueue:
    """Rows that wait for a function that is called with them as they come.

    Attributes:
        max_rows: of a work item.
        spread: a worker gets at most such a part of its share of the waiting rows.
    """

    max_rows: int
    spread: int
    rows: deque[RowReference] = field(default_factory=deque)

    def take(self, num_workers: int) -> list[RowReference]:
        """Return the next rows for one of so many workers."""
        size = min(self.max_rows, math.ceil(len(self.rows) / (num_workers * self.spread)))
        return [self.rows.popleft() for _ in range(size)]


def queue_for(spec: str, mode: CallMode, batch_size: int | None) -> RowQueue | None:
    """Return a function's queue; None if it gets a worker's share of all rows in one call, once all are there."""
    if mode == "rows" or spec in WAITING:
        return RowQueue(MAX_ROWS, 1)
    if mode == "row" or spec in BUILTIN:  # built-in functions score each row by itself
        return RowQueue(MAX_ROWS, SPREAD)
    return None if batch_size is None else RowQueue(batch_size, 1)


class Scoring:
    """Rows that are added as they come, and the grades that all functions together give each. See `RewardPool.begin`.

    Attributes:
        failure: the failure of the first row that has one, unless it ended the run; "" if there was none.
        num_errors, num_timeouts: rows for which a function failed.
    """

    def __init__(self, pool: "RewardPool", functions: Sequence[str]):
        self.rows: list[Row] = []
        self.failure = ""
        self.num_errors = self.num_timeouts = 0
        self._pool = pool
        self._functions = functions
        self._found: list[list[Graded | CallError | None]] = []
        self._num_begun = self._num_settled = 0
        self._is_complete = False
        self._first_failed = math.inf

    @property
    def num_pending(self) -> int:
        """Results of functions that have been requested and are not there yet."""
        return self._num_begun - self._num_settled

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows; workers may begin with them at once."""
        first = len(self.rows)
        self.rows += rows
        self._found += [[None] * len(self._functions) for _ in rows]
        self._num_begun += self._pool.put([RowReference(self, index) for index in range(first, len(self.rows))])

    def end(self) -> None:
        """Report that all rows have been added: functions that get a share of all may begin."""
        if not self._is_complete:
            self._num_begun += self._pool.put_shares([RowReference(self, index) for index in range(len(self.rows))])
        self._is_complete = True

    def results(self) -> list[Graded]:
        """Wait for the grades of all rows and return them in order. A row for which a function failed has no scores.

        Raises:
            RewardError: a function failed, and reward.on_error is raise, or the pool is closed.
        """
        self.end()
        self._pool.wait(lambda: not self.num_pending)
        failures = [one for of_row in self._found if (one := _failure(of_row)) is not None]
        self.num_timeouts = sum(failure.is_late for failure in failures)
        self.num_errors = len(failures) - self.num_timeouts
        return self._grades(self._found)

    def known(self, indices: range) -> list[Graded] | None:
        """Return the grades of some rows if all are there by now.

        Raises:
            RewardError: as in `results`.
        """
        found = self._found[indices.start : indices.stop]
        if any(one is None for of_row in found for one in of_row):
            self._pool.check()
            return None
        return self._grades(found)

    def note_failure(self, index: int, failure: str) -> None:
        """Note a failure of a row that does not end the run."""
        if index < self._first_failed:
            self._first_failed, self.failure = index, failure

    def settle(self, index: int, function: int, found: Graded | CallError) -> None:
        """Note the result of a function for a row."""
        self._found[index][function] = found
        self._num_settled += 1

    def _grades(self, found: Sequence[Sequence[Any]]) -> list[Graded]:
        grades = [[one if isinstance(one, Graded) else None for one in of_row] for of_row in found]
        return combined(grades, self._functions)


def _failure(of_row: Sequence[Any]) -> CallError | None:
    return next((one for one in of_row if isinstance(one, CallError)), None)


def shown(rows: Sequence[RowReference]) -> str:
    """Return which rows they are, for a message."""
    row = rows[0].row
    count = f"{len(rows)} responses, of which the first is" if len(rows) > 1 else "response"
    record = f" ({row.name})" if row.name else ""
    return f"it was scoring {count} {_shortened(row.response)} to prompt {_shortened(row.prompt)}{record}"


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]!r}... ({len(text)} characters)"
