"""Workers whose user code takes part in episodes, many in each: an environment, or an agent."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

from megappo.config.schema import Reward
from megappo.config.sections import Rollout
from megappo.errors import ActionableError
from megappo.runtime.heartbeat import heartbeat
from megappo.userland.user_code import JsonObject
from megappo.userland.worker_process import CallError, WorkerPool, WorkerProcess

FAILED_SECONDS = 5.0
"""Time that a failed run waits for user code to be closed."""
FIRST_CALLS = ("reset", "begin")
"""Methods of hosts that begin an episode."""
MOST_BEGINNING = 8
"""Episodes that a worker begins at once. User code may compute when an episode begins (a client of OpenAI's reads all
certificates, 30 ms); a thousand of them one after the other would block a worker for longer than a call may take."""


class EnvironmentFault(ActionableError, RuntimeError):
    """The code of an environment or agent is wrong; the run ends."""


class EpisodeLost(Exception):
    """An environment or agent took too long, or its process ended. Its episode cannot continue; the others do."""


class EpisodePool(WorkerPool):
    """The workers of an environment or agent, which may be used as a context manager.

    Args:
        arguments: see `WorkerPool`.
    Attributes:
        session_type: the type of `session`.
        beginning: limits the episodes that begin at once.
    Raises:
        EnvironmentFault: the code cannot be loaded.
    """

    error = EnvironmentFault
    session_type: "type[Session]"

    def __init__(self, *arguments: Any, **limits: Any):
        super().__init__(*arguments, **limits)
        self._numbers = itertools.count()
        self._replacing = asyncio.Lock()
        self.beginning = asyncio.Semaphore(MOST_BEGINNING * self.num_workers)
        self._closing: set[Future] = set()
        self._num_episodes: Counter[WorkerProcess] = Counter()

    async def in_thread(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine that the pool's thread runs, with time limits of its own, to any other
        event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        """Open the session of a new episode, in the worker with the fewest episodes."""
        worker = await self.in_thread(self._free_worker())
        number = next(self._numbers)
        try:
            yield self.session_type(self, worker, number)
        finally:
            if not self.is_closed:
                closing = asyncio.run_coroutine_threadsafe(self._leave(worker, number), self._loop)
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def _free_worker(self) -> WorkerProcess:
        async with self._replacing:
            for worker in [one for one in self.workers if not one.is_up]:
                try:
                    await self.replace(worker)
                except CallError as error:
                    raise self.fault(str(error)) from error
        worker = min(self.workers, key=self._num_episodes.__getitem__)
        self._num_episodes[worker] += 1
        return worker

    async def _leave(self, worker: WorkerProcess, number: int) -> None:
        """Close an episode, which nobody waits for."""
        self._num_episodes[worker] -= 1
        with suppress(CallError):  # it is gone
            await worker.call("close", {"number": number}, self.timeout_seconds)

    def __exit__(self, *error: object) -> None:
        """End all workers, after episodes in progress are closed or the time for that is over."""
        try:
            with heartbeat.waiting():
                wait(list(self._closing), self.timeout_seconds if error[0] is None else FAILED_SECONDS)
        finally:
            self.close()


def episode_limits(rollout: Rollout, reward: Reward) -> dict[str, Any]:
    """Return the number and limits of the workers of episodes: `WorkerPool`'s arguments. Some are reward functions'."""
    return {
        "num_workers": rollout.num_environment_workers,
        "timeout_seconds": rollout.environment_timeout_seconds,
        "memory_limit_gib": reward.memory_limit_gib,
        "pass_env": reward.pass_env,
    }


class Session:
    """The environment or agent of one episode, in its worker.

    Attributes:
        names_method: losses name the method that was called.
    """

    names_method = True

    def __init__(self, pool: Any, worker: WorkerProcess, number: int):
        self.pool = pool
        self._worker = worker
        self._number = number

    async def call(self, method: str, arguments: JsonObject) -> Any:
        """Return the result of a method of the worker's host.

        Raises:
            EpisodeLost: it takes too long, or its process ended.
            EnvironmentFault: it raised.
        """
        try:
            return await self.pool.in_thread(self._call(method, {"number": self._number, **arguments}))
        except CallError as error:
            if error.is_late or not self._worker.is_up:
                raise EpisodeLost(f"{method} {error}" if self.names_method else str(error)) from error
            raise self.pool.fault(f"{method} {error}") from error

    async def _call(self, method: str, arguments: JsonObject) -> Any:
        """Call a method in the pool's thread. The first call of an episode waits for its turn."""
        async with self.pool.beginning if method in FIRST_CALLS else nullcontext():
            return await self._worker.call(method, arguments, self.pool.timeout_seconds)
