"""Reward functions in worker processes: user code can neither hang nor crash the trainer.

Rows are scored as they are added. Each worker has a coroutine, which gives it one work item after the other and starts
another worker in place of one that hangs or dies. The path of a row:

`Scoring.add` -> `RewardPool.put` queues it for each function (`Scoring.end` -> `put_batches` for functions that wait
for all rows) -> `FunctionQueue.take` makes it part of a work item -> `_score` calls the worker and sets the outcome ->
`Scoring.results` combines the outcomes of all functions.

One rule for failures: each row of a call that fails is called alone, and a row that fails alone has failed.
"""

import asyncio
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from megappo.config.schema import Reward
from megappo.errors import ActionableError
from megappo.runtime.heartbeat import heartbeat
from megappo.userland.grades import FAILED, Grade, combined, grades_of
from megappo.userland.signatures import CallMode, Row
from megappo.userland.spec import WAITING, parse_spec
from megappo.userland.worker_process import GRACE_SECONDS, CallError, WorkerPool, WorkerProcess

MAX_ROWS = 64
"""Most rows of a work item, unless they must be scored together."""
ITEMS_PER_WORKER = 4
"""A worker that scores one row after the other takes at most this fraction, 1/4, of its even share of the waiting rows
at a time."""
MAX_LATE_ALONE = 3
"""The first rows of a failed call, each called alone, that may be late before all others fail."""
MAX_SHOWN = 200
"""Characters of a text in a message."""

LIMIT_SIGNS = ("ended its process", "MemoryError", "allocate memory", "CalledProcessError")
"""Texts in the messages of failures that a memory limit may have caused."""


class RewardError(ActionableError, RuntimeError):
    """A reward function failed; the message names it and the remedy. The workers have ended."""


@dataclass(eq=False)
class PendingRow:
    """A row that waits for a function's grade.

    Attributes:
        outcome: the grade, or why there is none; None: it still waits.
    """

    row: Row
    outcome: Grade | CallError | None = None

    @property
    def grade(self) -> Grade:
        """The grade of a row that no longer waits."""
        return FAILED if isinstance(self.outcome, CallError) else self.outcome

    @property
    def is_late(self) -> bool:
        """True if it has failed because of the time limit."""
        return isinstance(self.outcome, CallError) and self.outcome.is_late


@dataclass(eq=False)
class FunctionQueue:
    """A reward function, and the rows that wait for it.

    Attributes:
        weight: factor of its scores.
        batch_size: reward.batch_size.
        rows: rows to score as they come.
        batches: rows to score in one call.
        waits_for_all: it is called once all rows have been added, with an even part of them for each worker.
        max_rows: most rows of a work item, unless it waits for all.
    """

    index: int
    spec: str
    weight: float
    mode: CallMode
    batch_size: int | None
    rows: deque[PendingRow] = field(default_factory=deque)
    batches: deque[Sequence[PendingRow]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        is_batched = self.mode == "list" and self.spec not in WAITING
        self.waits_for_all = is_batched and self.batch_size is None
        self.max_rows = self.batch_size or MAX_ROWS if is_batched else MAX_ROWS

    def take(self, num_workers: int) -> Sequence[PendingRow]:
        """Return the next rows for one of `num_workers` workers."""
        if self.batches:
            return self.batches.popleft()
        num_items = num_workers * ITEMS_PER_WORKER if self.mode == "one" else num_workers
        size = math.ceil(len(self.rows) / num_items)
        return [self.rows.popleft() for _ in range(min(self.max_rows, size))]


class RewardPool(WorkerPool):
    """Reward functions in worker processes, which may be used as a context manager. It is closed after an error.

    Attributes:
        names: names of the functions; if two share a name, their specs.
        waits_for_all: no response has its scores before all responses have been written.
    Raises:
        ValueError: a name is malformed or names no file.
        RewardError: a file cannot be imported or has no such function.
    """

    kind = "reward function"
    error = RewardError

    def __init__(self, reward: Reward):
        specs = {spec: parse_spec(spec) for spec in reward.weights}
        super().__init__(
            " + ".join(specs),
            "rewards",
            {"functions": [(one.source, one.name, reward.options.get(spec, {})) for spec, one in specs.items()]},
            num_workers=reward.num_workers,
            timeout_seconds=reward.timeout_seconds,
            memory_limit_gib=reward.memory_limit_gib,
            pass_env=reward.pass_env,
        )
        self.on_error = reward.on_error
        names = [one.name for one in specs.values()]
        self.names = [name if names.count(name) == 1 else spec for spec, name in zip(specs, names, strict=True)]
        self.queues: list[FunctionQueue] = []
        for spec, mode in zip(specs, self.description.modes, strict=True):
            self.queues.append(FunctionQueue(len(self.queues), spec, reward.weights[spec], mode, reward.batch_size))
        self.waits_for_all = any(queue.waits_for_all for queue in self.queues)
        self._has_work = asyncio.Event()
        self._changed = threading.Condition()
        self._error: RewardError | None = None
        self.reported: set[str] = set()
        serving = [self._serve(worker) for worker in self.workers]
        self._serving = [asyncio.run_coroutine_threadsafe(one, self._loop) for one in serving]

    def begin(self) -> "Scoring":
        """Return a scoring, to which responses are added as they come.

        Raises:
            RewardError: the pool is closed.
        """
        self.check()
        return Scoring(self)

    def score(self, rows: Sequence[Row]) -> list[Grade]:
        """Return the grades of responses, in order.

        Raises:
            RewardError: a function raised, hung, died, or returned something wrong.
        """
        scoring = self.begin()
        scoring.add(rows)
        return scoring.results()

    def put(self, rows: Sequence[Row]) -> list[list[PendingRow]]:
        """Queue rows for the functions that are called as rows come; return each row once for each function."""
        pending = [[PendingRow(row) for _ in self.queues] for row in rows]
        for queue in self.queues:
            if not queue.waits_for_all:
                queue.rows += [of_row[queue.index] for of_row in pending]
        self.post(self._has_work.set)
        return pending

    def put_batches(self, pending: Sequence[Sequence[PendingRow]]) -> None:
        """Queue all rows of a scoring, an even part for each worker, for the functions that wait for all rows."""
        num_rows = len(pending)
        parts = range(min(self.num_workers, num_rows))
        for queue in self.queues:
            if queue.waits_for_all:
                rows = [of_row[queue.index] for of_row in pending]
                queue.batches += [rows[i * num_rows // len(parts) : (i + 1) * num_rows // len(parts)] for i in parts]
        self.post(self._has_work.set)

    def check(self) -> None:
        """Raise the error that has ended the pool, and close it.

        Raises:
            RewardError: a function failed, or the pool is closed.
        """
        if self.is_closed:
            raise RewardError(f"reward function {self.spec} is closed")
        if self._error is not None:
            self.close()
            raise self._error

    def wait(self, pending: PendingRow) -> None:
        """Wait until a row has a grade or has failed; every call has a time limit.

        Raises:
            RewardError: as in `check`.
        """
        with self._changed:
            self._changed.wait_for(lambda: pending.outcome or self._error or self.is_closed)
        if pending.outcome is None:
            self.check()

    async def _serve(self, worker: WorkerProcess) -> None:
        """Keep a worker, and any worker that replaces it, busy."""
        try:
            while self._error is None:
                queue = next((one for one in self.queues if one.batches or one.rows), None)
                if queue is None:
                    self._has_work.clear()
                    await self._has_work.wait()
                else:
                    worker = await self._score(worker, queue, queue.take(self.num_workers))
                    self._notify()
        except CallError as error:
            self._fail(self.fault(str(error)))
        except Exception as error:
            self._fail(self.fault(f"could not be run ({type(error).__name__}: {error})"))

    async def _score(self, worker: WorkerProcess, queue: FunctionQueue, rows: Sequence[PendingRow]) -> WorkerProcess:
        """Score rows in a worker. Return it, or the worker that replaces it if it is lost; the rows that a lost worker
        has not begun wait again.

        A worker that was lost after its last reply, such as by sending too much, fails the next call.
        """
        calls = [rows] if queue.mode == "list" else [[row] for row in rows]
        replies = []
        for called in calls:
            arguments = {"function": queue.index, "rows": [one.row[:4] for one in called]}  # without their names
            replies.append(worker.begin("score", arguments, self.timeout_seconds))
        grace_seconds = GRACE_SECONDS if queue.mode == "one_async" else 0.0
        for i, called in enumerate(calls):
            try:
                values = await worker.result(replies[i], self.timeout_seconds, grace_seconds)
                grades = grades_of(values, [one.row.response for one in called], queue.weight)
            except CallError as error:
                if worker.is_up:
                    worker = await self._retry(worker, queue, called, error)
                    continue
                rest = list(chain.from_iterable(calls[i + 1 :]))
                if queue.mode == "one_async":  # they were in progress, too
                    called = [*called, *rest]
                    rest = []
                queue.rows.extendleft(reversed(rest))
                return await self._retry(worker, queue, called, error)
            for one, grade in zip(called, grades, strict=True):
                one.outcome = grade
        return worker

    async def _retry(
        self,
        worker: WorkerProcess,
        queue: FunctionQueue,
        rows: Sequence[PendingRow],
        failure: CallError,
    ) -> WorkerProcess:
        """Call each of several rows alone after the call of them all has failed; a row that fails alone has failed.

        If reward.on_error is raise, the first row that fails alone ends the run; without one the failed call does. The
        function is called again only if it has raised an error, and waits for no server.
        """
        ends_run = self.on_error == "raise"
        if ends_run and (len(rows) == 1 or not failure.has_raised or queue.spec in WAITING):
            self._fail(self._error_of(queue, rows, failure))
        if self._error is not None:
            return worker
        if not worker.is_up:
            worker = await self.replace(worker)
        if len(rows) == 1:
            rows[0].outcome = failure
            return worker
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_seconds if ends_run else None):
                for i, row in enumerate(rows):
                    if i == MAX_LATE_ALONE and all(one.is_late for one in rows[:i]):
                        for late in rows[i:]:
                            late.outcome = failure
                        break
                    alone = PendingRow(row.row) if ends_run else row  # a call that has failed gives no grades there
                    worker = await self._score(worker, queue, [alone])
        if ends_run:
            self._fail(self._error_of(queue, rows, failure))
        return worker

    def _error_of(self, queue: FunctionQueue, rows: Sequence[PendingRow], failure: CallError) -> RewardError:
        """Return an error with what to do about a failure; limits are named where one may be its cause."""
        has_met_limit = failure.is_late or any(sign in str(failure) for sign in LIMIT_SIGNS)
        limits = f"reward.timeout_seconds={self.timeout_seconds:g}, reward.memory_limit_gib={self.memory_limit_gib}"
        change = f"change its limits ({limits}), " if has_met_limit else ""
        remedy = f"fix it, {change}or, if few calls fail, set reward.on_error=zero, which scores these responses 0"
        return RewardError(f"{described(queue.spec, failure, rows)}\n{remedy}")

    def _fail(self, error: RewardError) -> None:
        """End the run's scoring: whatever waits for a grade gets the first error."""
        self._error = self._error or error
        for worker in self.workers:
            worker.stop()
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Scoring:
    """Rows that are added as they come, and the grades that all functions together give each. See `RewardPool.begin`.

    Attributes:
        failure: the failure of the first row that has one, unless it ended the run; "" if there was none.
        num_errors, num_timeouts: rows for which a function failed.
    """

    def __init__(self, pool: RewardPool):
        self.failure = ""
        self.num_errors = self.num_timeouts = 0
        self._pool = pool
        self._pending: list[list[PendingRow]] = []
        self._is_complete = False

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows; workers may begin with them at once."""
        self._pending += self._pool.put(rows)

    def end(self) -> None:
        """Report that all rows have been added: functions that wait for all rows may begin."""
        if not self._is_complete:
            self._pool.put_batches(self._pending)
        self._is_complete = True

    def results(self) -> list[Grade]:
        """Wait for the grades of all rows and return them in order. A row for which a function failed has no scores.

        Raises:
            RewardError: a function failed, and reward.on_error is raise, or the pool is closed.
        """
        self.end()
        with heartbeat.waiting():
            for pending in chain.from_iterable(self._pending):
                self._pool.wait(pending)
        self.num_errors = self.num_timeouts = 0
        for of_row in reversed(self._pending):  # the last message is the first row's
            for queue, one in zip(self._pool.queues, of_row, strict=True):
                if isinstance(one.outcome, CallError):
                    self.failure = described(queue.spec, one.outcome, of_row[:1])
                    self.num_timeouts += one.outcome.is_late
                    self.num_errors += not one.outcome.is_late
                    break
        return self._grades(self._pending)

    def known(self, indices: range) -> list[Grade] | None:
        """Return the grades of some rows if all are there by now.

        Raises:
            RewardError: as in `results`.
        """
        pending = self._pending[indices.start : indices.stop]
        if any(one.outcome is None for one in chain.from_iterable(pending)):
            self._pool.check()
            return None
        return self._grades(pending)

    def _grades(self, pending: Sequence[Sequence[PendingRow]]) -> list[Grade]:
        grades = [[one.grade for one in of_row] for of_row in pending]
        return combined(grades, self._pool.names)


def described(spec: str, failure: CallError, rows: Sequence[PendingRow]) -> str:
    """Return a message about a function's failure; of the rows it shows the one to blame, else the first."""
    row = rows[failure.index or 0].row
    is_known = len(rows) == 1 or failure.index is not None
    count = "response" if is_known else f"{len(rows)} responses, of which the first is"
    record = f" ({row.name})" if row.name else ""
    where = f"{count} {_shortened(row.response)} to prompt {_shortened(row.prompt)}{record}"
    return f"reward function {spec} {failure}\nit was scoring {where}"


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]!r}... ({len(text)} characters)"


def load_reward(specs: str | Mapping[str, float], **settings: Any) -> RewardPool:
    """Return the pool of a reward function, or of several, each with the factor of its scores.

    Args:
        specs: a built-in's name, FILE.py:FUNCTION or package.module:FUNCTION, with one of `signatures.FORMS`.
        settings: further keys of the config's section `reward`.
    """
    return RewardPool(Reward.model_validate({"function": specs, **settings}))
