"""Reward functions in worker processes: people's code can neither hang nor crash the trainer.

Rows are scored as they are added. Each worker has a coroutine, which gives it one work item after the other and starts
another worker in place of one that hangs or dies.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megappo.config.schema import Reward
from megappo.errors import ActionableError
from megappo.runtime.heartbeat import heartbeat
from megappo.userland.grades import Graded, checked
from megappo.userland.scoring import Retry, RowQueue, RowReference, Scoring, WorkItem, queue_for, shown
from megappo.userland.signatures import CallMode, InputSpec, Row
from megappo.userland.spec import parse_spec
from megappo.userland.user_code import BadFunction
from megappo.userland.worker_process import GRACE_SECONDS, CallError, WorkerPool, WorkerProcess

MEMORY_SIGNS = ("MemoryError", "memory", "ended its process", "CalledProcessError")
"""Found in the reason for a failure that may be due to the memory limit."""


class RewardError(ActionableError, RuntimeError):
    """A reward function failed; the message names it and the remedy. The workers have ended."""


@dataclass(frozen=True)
class Description:
    """The inputs of all functions that a worker has loaded together, and the mode of each."""

    inputs: InputSpec
    modes: list[CallMode]


_DESCRIPTION = TypeAdapter(Description)


class RewardPool(WorkerPool):
    """Reward functions in worker processes, which may be used as a context manager. It is closed after an error.

    Attributes:
        spec: the functions' names.
        takes: the fields of a record that the functions get.
        waits_for_all: no response has its scores before all responses have been written.
    Raises:
        ValueError: a name is malformed or names no file.
        RewardError: a file cannot be imported or has no such function.
    """

    def __init__(self, reward: Reward):
        functions = []
        names = []
        for spec, weight in reward.weights.items():
            found = parse_spec(spec)
            functions.append((found.module or found.file, found.name, weight, reward.options.get(spec, {})))
            names.append(found.name)
        super().__init__(
            "rewards",
            {"functions": functions},
            num_workers=reward.num_workers,
            timeout_seconds=reward.timeout_seconds,
            memory_limit_gib=reward.memory_limit_gib,
            pass_env=reward.pass_env,
        )
        self.spec = " + ".join(reward.weights)
        self.on_error = reward.on_error
        self._memory_limit_gib = reward.memory_limit_gib
        specs = list(reward.weights)
        self._names = [name if names.count(name) == 1 else spec for name, spec in zip(names, specs, strict=True)]
        self._changed = threading.Condition()
        self._error: RewardError | None = None
        self._is_closed = False
        self._items: deque[WorkItem] = deque()
        self._queues: list[RowQueue | None] = []
        self._has_work = asyncio.Event()
        self._descriptions: list[Description] = []
        self._post(self._begin)
        self.wait(lambda: len(self._descriptions) == self.num_workers)
        self.takes, self._modes = self._descriptions[0].inputs, self._descriptions[0].modes
        self._queues = [queue_for(*one, reward.batch_size) for one in zip(specs, self._modes, strict=True)]
        self.waits_for_all = None in self._queues

    def begin(self) -> Scoring:
        """Return a scoring, to which responses are added as they come.

        Raises:
            RewardError: the pool is closed.
        """
        self.check()
        return Scoring(self, self._names)

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        labels: Sequence[Any],
        columns: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Graded]:
        """Return the grades of responses, in order.

        Args:
            columns: the fields of each response's record that the functions get; None: there are none.
        Raises:
            RewardError: a function raised, hung, died, or returned something wrong.
        """
        columns = [{}] * len(responses) if columns is None else columns
        lists = {"prompts": prompts, "responses": responses, "labels": labels, "columns": columns}
        if len(set(map(len, lists.values()))) > 1:
            counts = ", ".join(f"{len(values)} {name}" for name, values in lists.items())
            raise ValueError(f"{counts}: expected as many of each")
        scoring = self.begin()
        scoring.add([Row(*of_row) for of_row in zip(prompts, responses, labels, columns, strict=True)])
        return scoring.results()

    def put(self, rows: Sequence[RowReference]) -> int:
        """Queue rows for the functions that are called as rows come; return how many results that makes."""
        queues = [queue for queue in self._queues if queue is not None]

        def extend() -> None:
            for queue in queues:
                queue.rows += rows
            self._has_work.set()

        self._post(extend)
        return len(queues) * len(rows)

    def put_shares(self, rows: Sequence[RowReference]) -> int:
        """Queue all rows of a scoring for the functions that get a share of all; return how many results that makes."""
        functions = [function for function, queue in enumerate(self._queues) if queue is None]
        count = min(self.num_workers, len(rows))
        bounds = [len(rows) * i // count for i in range(count + 1)] if rows else [0]
        parts = [rows[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
        items = [WorkItem(function, part) for function in functions for part in parts]

        def extend() -> None:
            self._items += items
            self._has_work.set()

        self._post(extend)
        return len(functions) * len(rows)

    def check(self) -> None:
        """Raise the error that has closed the pool.

        Raises:
            RewardError: the pool is closed.
        """
        if self._is_closed:
            self.wait(lambda: False)

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until the workers have done something; every call has a time limit.

        Raises:
            RewardError: a function failed, or the pool is closed.
        """
        with heartbeat.waiting(), self._changed:
            self._changed.wait_for(lambda: is_done() or self._is_closed)
            error, self._error = self._error, None
        if error is not None:
            self.close()
            raise error
        if not is_done():
            raise RewardError(f"reward function {self.spec} is closed")

    def close(self) -> None:
        """End all workers and what they started. May be called again."""
        self._is_closed = True
        super().close()

    def _begin(self) -> None:
        self._tasks = [self._loop.create_task(self._serve()) for _ in range(self.num_workers)]

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    async def _serve(self) -> None:
        """Keep a worker busy."""
        worker = None
        try:
            while not self._is_closed:
                worker = worker or await self._load_worker()
                item = self._next()
                if item is None:
                    self._has_work.clear()
                    await self._has_work.wait()
                    continue
                if not await self._work(worker, item):
                    await self._end(worker)
                    worker = None
        except CallError as error:
            self._fail(str(error))
        except Exception as error:
            self._fail(f"could not be run ({type(error).__name__}: {error})")
            raise

    async def _load_worker(self) -> WorkerProcess:
        worker, description = await self._start()
        try:
            self._descriptions.append(_DESCRIPTION.validate_python(description))
        except ValidationError as error:
            raise CallError("answered with something else than its signature") from error
        self._notify()
        return worker

    def _next(self) -> WorkItem | None:
        if self._items:
            return self._items.popleft()
        for function, queue in enumerate(self._queues):
            if queue is not None and queue.rows:
                return WorkItem(function, queue.take(self.num_workers))
        return None

    async def _work(self, worker: WorkerProcess, item: WorkItem) -> bool:
        """Have a worker do a work item; return whether it can go on. Else rows that it has not begun with wait again.

        A worker that was lost after its last reply, such as by sending too much, fails the next item.
        """
        mode, seconds = self._modes[item.function], self.timeout_seconds
        calls = [item.rows] if mode == "share" else [[row] for row in item.rows]
        replies = [
            worker.begin("score", {"function": item.function, "rows": [one.row[:4] for one in rows]}, seconds)
            for rows in calls
        ]
        grace_seconds = GRACE_SECONDS if mode == "rows" else 0.0
        for i, (rows, reply) in enumerate(zip(calls, replies, strict=True)):
            try:
                fields = await worker.result(reply, seconds, grace_seconds)
                grades = checked(fields, [one.row.response for one in rows])
            except (CallError, BadFunction) as error:
                failure = error if isinstance(error, CallError) else CallError(self._named(item.function, error))
                rest = [] if worker.is_up else list(chain.from_iterable(calls[i + 1 :]))
                if mode == "rows":  # they were in progress, too
                    rows, rest = [*rows, *rest], []
                self._settle_failed(item, rows, failure)
                self._requeue(item.function, rest)
                if not worker.is_up:
                    return False
            else:
                self._settle(item, rows, grades)
        return True

    def _named(self, function: int, error: BadFunction) -> str:
        return str(error) if len(self._names) == 1 else f"({self._names[function]}) {error}"

    def _requeue(self, function: int, rows: Sequence[RowReference]) -> None:
        queue = self._queues[function]
        if queue is not None and rows:
            queue.rows.extendleft(reversed(rows))
            self._has_work.set()

    def _settle(self, item: WorkItem, rows: Sequence[RowReference], found: Sequence[Graded | CallError]) -> None:
        if item.retry is not None:
            item.retry.has_scored |= isinstance(found[0], Graded)
        for reference, one in zip(rows, found, strict=True):
            reference.scoring.settle(reference.index, item.function, one)
            if reference.scoring.num_pending <= 0:
                self._notify()

    def _settle_failed(self, item: WorkItem, rows: Sequence[RowReference], failure: CallError) -> None:
        """Note that a call failed: raise it, or call each of several rows alone, while there is hope."""
        if self.on_error == "raise":
            remedies = ["set reward.on_error to zero, which gives such responses 0"]
            if failure.is_late:
                remedies.insert(0, f"raise reward.timeout_seconds ({self.timeout_seconds:g})")
            return self._fail(str(failure), rows, *remedies)
        for reference in rows:
            reference.scoring.note_failure(reference.index, f"reward function {self.spec} {failure}\n{shown(rows)}")
        if len(rows) > 1:
            retry = Retry()
            self._items += [WorkItem(item.function, [one], retry) for one in rows]
            return self._has_work.set()
        self._settle(item, rows, [failure])
        if item.retry is not None:
            item.retry.num_late += failure.is_late
            if item.retry.is_hopeless:
                hopeless = [one for one in self._items if one.retry is item.retry]
                self._items = deque(one for one in self._items if one.retry is not item.retry)
                for other in hopeless:
                    self._settle(other, other.rows, [failure])
        return None

    def _fail(self, reason: str, rows: Sequence[RowReference] = (), *remedies: str) -> None:
        """Close the pool with an error.

        Args:
            remedies: besides fixing the function.
        """
        if self._is_closed:
            return
        remedies = ("fix it", *(remedies or ("choose another reward.function",)))
        limit, first_line = self._memory_limit_gib, reason.partition("\n")[0]
        if limit is not None and any(sign in first_line for sign in MEMORY_SIGNS):
            remedies = (*remedies, f"raise reward.memory_limit_gib ({limit:g})")
        where = f"\n{shown(rows)}" if rows else ""
        self._error = RewardError(f"reward function {self.spec} {reason}{where}\n{', or '.join(remedies)}")
        self._is_closed = True
        for worker in self._workers:
            worker.stop()
        self._notify()


def load_reward(specs: str | Mapping[str, float], **settings: Any) -> RewardPool:
    """Return the pool of a reward function, or of several, each with the factor of its scores.

    Args:
        specs: a built-in's name, FILE.py:FUNCTION or package.module:FUNCTION, with one of `signatures.FORMS`.
        settings: further keys of the config's section `reward`.
    """
    return RewardPool(Reward.model_validate({"function": specs, **settings}))
