"""The workers of reward functions and what keeps them busy: each has a thread, which starts it, calls it with one piece
of work after the other, and starts another where it hangs or dies.

The kernel ends a worker together with its thread, so that none outlives the trainer, however that ends.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from threading import Condition, Thread
from typing import Any, Literal

from megappo.errors import ActionableError
from megappo.runtime.heartbeat import LIFE
from megappo.userland.forms import Graded, Takes, Way
from megappo.userland.process import Failed, Function, Worker, WorkerError
from megappo.userland.work import Lane, Piece, Retry, Scoring, Unit, lane, rows_of, shares, shown

START_TIMEOUT_SECONDS = 60.0
"""How long a worker may take to import the user's file."""
CLOSE_TIMEOUT_SECONDS = 2.0
"""How long an idle worker may take to end by itself."""
LATE_SECONDS = 1.0
"""How long a worker may take to say that an async call has had its time."""

TASK = "score its responses"
LACKED_MEMORY = ("MemoryError", "memory", "ended its process", "CalledProcessError")
"""What the reason for a failure may have in it where a worker had too little."""


class RewardError(ActionableError, RuntimeError):
    """The reward function failed; the message names it and says what to do. The workers are gone."""


@dataclass(frozen=True)
class Settings:
    """How reward functions are run.

    Attributes:
        num_workers: processes.
        timeout_seconds: how long one call may take.
        memory_limit_gib: memory that a process may take; None: any.
        pass_env: variables that the workers get although their names are those of secrets.
        on_error: whether an error ends the crew, or the responses that it is about are `Failed`.
        batch_size: rows that functions of lists are called with as they come; None: with a worker's share of all.
        options: by a function's spec, arguments that it gets in every call.
    """

    num_workers: int
    timeout_seconds: float
    memory_limit_gib: float | None = None
    pass_env: Collection[str] = ()
    on_error: Literal["raise", "zero"] = "raise"
    batch_size: int | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Crew:
    """Workers that have loaded the functions.

    Args:
        functions: by spec.
    Attributes:
        takes: what the functions take of a record besides prompt and label.
    Raises:
        RewardError: the functions cannot be loaded.
    """

    def __init__(self, functions: Mapping[str, Function], settings: Settings):
        self.spec = " + ".join(functions)
        self.settings = settings
        self._functions = list(functions.values())
        num_of = Counter(one.name for one in self._functions)
        self._names = [one.name if num_of[one.name] == 1 else spec for spec, one in functions.items()]
        self._changed = Condition()
        """Held to touch what follows, or a scoring."""
        self._pieces: deque[Piece] = deque()
        self._workers: set[Worker] = set()
        self._loaded: list[tuple[Takes, list[Way]]] = []
        self._error: RewardError | None = None
        self._is_closed = False
        self._ending_seconds = CLOSE_TIMEOUT_SECONDS
        workers = range(settings.num_workers)
        self._threads = [Thread(target=self._serve, name="reward-worker", daemon=True) for _ in workers]
        self._lanes: list[Lane | None] = []
        for thread in self._threads:
            thread.start()
        self._wait(lambda: len(self._loaded) == settings.num_workers)
        self.takes, ways = self._loaded[0]
        size = settings.batch_size
        self._lanes += [lane(way, size, spec) for way, spec in zip(ways, functions, strict=True)]

    @property
    def waits_for_all(self) -> bool:
        """Whether a function is called once all rows are there."""
        return None in self._lanes

    def begin(self) -> Scoring:
        """Rows to be added as they come.

        Raises:
            RewardError: the crew is gone.
        """
        if self._is_closed and self._error is None:
            raise self._closed()
        return Scoring(self, self._names)

    def put(self, units: Sequence[Unit]) -> None:
        """Have workers begin with rows, but for functions that get a share of all."""
        with self._changed:
            for waits in filter(None, self._lanes):
                waits.waiting += units
                units[0].scoring.num_left += len(units)
            self._changed.notify_all()

    def put_shares(self, units: Sequence[Unit]) -> None:
        """Have workers begin with all rows of a scoring, for functions that get a share of all."""
        with self._changed:
            for function, waits in enumerate(self._lanes):
                if waits is None:
                    self._pieces += [Piece(function, part) for part in shares(units, self.settings.num_workers)]
                    units[0].scoring.num_left += len(units)
            self._changed.notify_all()

    def wait_for(self, scoring: Scoring) -> None:
        """Wait until its rows have all their results.

        Raises:
            RewardError: a function failed, or the crew is gone.
        """
        self._wait(lambda: not scoring.num_left)

    def check(self) -> None:
        """See that there may be more results.

        Raises:
            RewardError: a function failed, or the crew is gone.
        """
        if self._is_closed:
            self._wait(lambda: False)

    def close(self, timeout_seconds: float = CLOSE_TIMEOUT_SECONDS) -> None:
        """End all workers and what they started. May be called again.

        Args:
            timeout_seconds: how long an idle one may take to end by itself.
        """
        with self._changed:
            self._close(timeout_seconds)
        for thread in self._threads:
            thread.join()

    def _close(self, timeout_seconds: float) -> None:
        self._is_closed = True
        self._ending_seconds = timeout_seconds
        for worker in self._workers:
            worker.hang_up()
        self._changed.notify_all()

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Every call has a time limit, so that this ends."""
        with LIFE.waiting(), self._changed:
            self._changed.wait_for(lambda: is_done() or self._is_closed)
            error, self._error = self._error, None
        if error is not None:
            self.close()
            raise error
        if not is_done():
            raise self._closed()

    def _closed(self) -> RewardError:
        return RewardError(f"reward function {self.spec} is closed")

    def _serve(self) -> None:
        """What a worker's thread does."""
        worker = None
        try:
            while not self._is_closed:
                worker = worker or self._start()
                piece = self._next()
                if piece is not None and not self._run_piece(worker, piece):
                    self._end(worker, 0.0)
                    worker = None
        except (WorkerError, TimeoutError) as error:  # it does not start
            self._fail(_reason(error, START_TIMEOUT_SECONDS, "load"))
        except BaseException as error:
            self._fail(f"could not be run ({type(error).__name__}: {error})")
            raise
        finally:
            if worker is not None:
                self._end(worker, self._ending_seconds)

    def _start(self) -> Worker:
        worker = Worker(self._functions, self.settings.memory_limit_gib, self.settings.pass_env)
        try:
            with self._changed:
                self._workers.add(worker)
                if self._is_closed:
                    worker.hang_up()
            loaded = worker.wait_ready(time.monotonic() + START_TIMEOUT_SECONDS)
        except BaseException:
            self._end(worker, 0.0)
            raise
        with self._changed:
            self._loaded.append(loaded)
            self._changed.notify_all()
        return worker

    def _end(self, worker: Worker, timeout_seconds: float) -> None:
        with self._changed:
            self._workers.discard(worker)
        worker.hang_up()
        worker.end(timeout_seconds)

    def _next(self) -> Piece | None:
        """Waits for a piece of work; None: there will be none."""
        with self._changed:
            while not self._is_closed:
                if self._pieces:
                    return self._pieces.popleft()
                for function, waits in enumerate(self._lanes):
                    if waits is not None and waits.waiting:
                        return Piece(function, waits.take(self.settings.num_workers))
                self._changed.wait()
        return None

    def _run_piece(self, worker: Worker, piece: Piece) -> bool:
        """Have a worker do a piece; whether it has. Else it is of no more use, and what is left of that waits again."""
        function, units, retry = piece
        _, ways = self._loaded[0]
        way, seconds = ways[function], self.settings.timeout_seconds
        parts: list[Sequence[Unit]] = [units] if way == "share" else [[unit] for unit in units]
        done, started = 0, time.monotonic()
        try:
            worker.call(function, rows_of(units), seconds)
            for part in parts:
                since = started + LATE_SECONDS if way == "rows" else time.monotonic()
                found = worker.answer([unit.row.response for unit in part], since + seconds)
                self._settle(function, part, found, retry)
                done += 1
        except (WorkerError, TimeoutError) as error:
            failed = Failed(_reason(error, seconds, TASK), isinstance(error, TimeoutError))
            last = done + 1 if way == "row" else len(parts)  # of those that it was busy with
            self._settle(function, list(chain.from_iterable(parts[done:last])), failed, retry)
            self._again(function, list(chain.from_iterable(parts[last:])))
            return False
        self._note_time(function, len(units), time.monotonic() - started)
        return True

    def _note_time(self, function: int, num_rows: int, seconds: float) -> None:
        with self._changed:
            if waits := self._lanes[function]:
                waits.took(num_rows, seconds)

    def _again(self, function: int, units: Sequence[Unit]) -> None:
        with self._changed:
            if waits := self._lanes[function]:
                waits.waiting.extendleft(reversed(units))
            self._changed.notify_all()

    def _settle(
        self, function: int, units: Sequence[Unit], found: Sequence[Graded] | Failed, retry: Retry | None
    ) -> None:
        """Note what a call has found of rows."""
        if isinstance(found, Failed):
            return self._settle_failed(function, units, found, retry)
        with self._changed:
            if retry is not None:
                retry.has_scored = True
            for unit, graded in zip(units, found, strict=True):
                unit.scoring.settle(unit, function, graded)
            self._changed.notify_all()

    def _settle_failed(self, function: int, units: Sequence[Unit], failed: Failed, retry: Retry | None) -> None:
        """Note that a call has found nothing of rows; of several, each is asked about alone, while there is hope."""
        reason = failed.reason or _reason(TimeoutError(), self.settings.timeout_seconds, TASK)
        if self.settings.on_error == "raise":
            remedies = ["set reward.on_error to zero, which gives such responses 0"]
            if failed.is_late:
                remedies.insert(0, f"raise reward.timeout_seconds ({self.settings.timeout_seconds:g})")
            return self._fail(reason, units, *remedies)
        with self._changed:
            for unit in units:
                told = f"reward function {self.spec} {reason}\n{shown(units)}"
                unit.scoring.failure = unit.scoring.failure or told
            if len(units) == 1:
                self._settle_alone(function, units[0], replace(failed, reason=reason), retry)
            else:
                again = Retry(time.monotonic())
                self._pieces += [Piece(function, [unit], again) for unit in units]
            self._changed.notify_all()

    def _settle_alone(self, function: int, unit: Unit, failed: Failed, retry: Retry | None) -> None:
        """Note that nothing was found of a row, nor would be of those that wait with it. Held: what has changed."""
        unit.scoring.settle(unit, function, failed)
        if retry is None:
            return
        retry.num_failed += 1
        if retry.is_hopeless(self.settings.timeout_seconds):
            given_up = [piece for piece in self._pieces if piece.retry is retry]
            self._pieces = deque(piece for piece in self._pieces if piece.retry is not retry)
            for other in chain.from_iterable(piece.units for piece in given_up):
                other.scoring.settle(other, function, failed)

    def _fail(self, reason: str, units: Sequence[Unit] = (), *remedies: str) -> None:
        """Close with an error, unless it is closed.

        Args:
            remedies: beside mending the function.
        """
        remedies = ("fix it", *(remedies or ("choose another reward.function",)))
        limit, first_line = self.settings.memory_limit_gib, reason.partition("\n")[0]
        if limit is not None and any(sign in first_line for sign in LACKED_MEMORY):
            remedies = (*remedies, f"raise reward.memory_limit_gib ({limit:g})")
        where = f"\n{shown(units)}" if units else ""
        with self._changed:
            if not self._is_closed:
                self._error = RewardError(f"reward function {self.spec} {reason}{where}\n{', or '.join(remedies)}")
                self._close(0.0)


def _reason(error: Exception, seconds: float, task: str) -> str:
    """What happened to a worker, to follow the function's name."""
    if not isinstance(error, TimeoutError):
        return str(error)
    detail = f" ({error})" if str(error) else ""
    return f"took longer than {seconds:g} seconds to {task} and was stopped{detail}"
