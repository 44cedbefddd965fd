"""Environments in worker processes, many in each: people's code can neither hang nor crash the trainer."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from megappo.config.rollout_section import Rollout
from megappo.config.schema import Reward
from megappo.errors import ActionableError
from megappo.runtime.heartbeat import heartbeat
from megappo.userland.environment_host import Messages
from megappo.userland.signatures import InputSpec
from megappo.userland.spec import parse_spec
from megappo.userland.worker_process import CallError, WorkerPool, WorkerProcess

FAILED_SECONDS = 5.0
"""Time that a failed run waits for environments to be closed."""


class EnvironmentFault(ActionableError, RuntimeError):
    """An environment's code is wrong; the run ends."""


class EpisodeLost(Exception):
    """An environment took too long, or its process ended. Its episode cannot go on, the others do."""


class Environment:
    """The environment of one episode."""

    def __init__(self, pool: "EnvironmentPool", worker: WorkerProcess, number: int):
        self._pool, self._worker, self._number = pool, worker, number

    async def reset(self, row: Mapping[str, Any]) -> Messages:
        """Begin; return the environment's first messages, after the prompt.

        Raises: as in `step`.
        """
        return await self._call("reset", {"row": row})

    async def step(self, message: Mapping[str, Any]) -> tuple[Messages, float | list[float], bool, dict[str, float]]:
        """Return the environment's answer to the policy's message, the reward of the turn (or of each token), whether
        the episode ends, and further numbers by name.

        Raises:
            EpisodeLost: it takes too long, or its process ended.
            EnvironmentFault: it raised, or returned something of the wrong type.
        """
        observation, reward, done, parts = await self._call("step", {"message": message})
        num_tokens = len(message["token_ids"])
        if isinstance(reward, list) and len(reward) != num_tokens:
            found = f"step returned {len(reward)} rewards for a turn of {num_tokens} tokens; expected as many, or one"
            raise self._pool.fault(found)
        return observation, reward, done, parts

    async def _call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        call = self._worker.call(method, {"number": self._number, **arguments}, self._pool.timeout_seconds)
        try:
            return await self._pool.in_thread(call)
        except CallError as error:
            if error.is_late or not self._worker.is_up:
                raise EpisodeLost(f"{method} {error}") from error
            raise self._pool.fault(f"{method} {error}") from error


class EnvironmentPool(WorkerPool):
    """The workers of an environment, which may be used as a context manager.

    Args:
        spec: for messages.
        code: source and name of the environment, and a list of arguments, see `EnvironmentHost`.
    Attributes:
        takes: the fields of a record that it gets, and the tools that it offers.
    Raises:
        EnvironmentFault: the file cannot be imported, or defines no such class.
    """

    def __init__(
        self,
        spec: str,
        code: Sequence[Any],
        *,
        num_workers: int,
        timeout_seconds: float,
        memory_limit_gib: float | None = None,
        pass_env: Collection[str] = (),
    ):
        source, name, *arguments = code
        super().__init__(
            "environments",
            {"source": source, "name": name, "arguments": arguments, "seconds": timeout_seconds},
            num_workers=num_workers,
            timeout_seconds=timeout_seconds,
            memory_limit_gib=memory_limit_gib,
            pass_env=pass_env,
        )
        self.spec = spec
        self._numbers = itertools.count()
        self._restarting = asyncio.Lock()
        self._closing: set[asyncio.Task] = set()
        self._num_episodes: Counter[WorkerProcess] = Counter()
        """Episodes of each worker that is in use."""
        try:
            inputs = [self._run(self._add_worker()) for _ in range(num_workers)]
        except EnvironmentFault:
            self.close()
            raise
        inputs = inputs[0] | {name: tuple(inputs[0][name]) for name in ("needed", "by_environment", "tools")}
        self.takes = InputSpec(**inputs)

    def fault(self, found: str) -> EnvironmentFault:
        """Return an error that names the environment and the remedy."""
        return EnvironmentFault(f"environment {self.spec} {found}\nfix it, or choose another one")

    async def in_thread(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine that the pool's thread runs, with time limits of its own, to any other
        event loop."""
        with heartbeat.waiting():
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    @asynccontextmanager
    async def environment(self) -> AsyncIterator[Environment]:
        """A new environment, in the worker that has fewest."""
        worker = await self.in_thread(self._free_worker())
        number = next(self._numbers)
        try:
            yield Environment(self, worker, number)
        finally:
            self._post(self._leave, worker, number)

    async def _add_worker(self) -> dict[str, Any]:
        try:
            worker, inputs = await self._start()
        except CallError as error:
            raise self.fault(str(error)) from error
        self._num_episodes[worker] = 0
        return inputs

    async def _free_worker(self) -> WorkerProcess:
        async with self._restarting:
            for worker in [one for one in self._num_episodes if not one.is_up]:
                await self._add_worker()
                del self._num_episodes[worker]
                await self._end(worker)
        worker = min(self._num_episodes, key=self._num_episodes.__getitem__)
        self._num_episodes[worker] += 1
        return worker

    def _leave(self, worker: WorkerProcess, number: int) -> None:
        """Have an environment closed, without waiting for it."""
        if worker in self._num_episodes:
            self._num_episodes[worker] -= 1
            task = self._loop.create_task(self._close_environment(worker, number))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_environment(self, worker: WorkerProcess, number: int) -> None:
        with suppress(CallError):  # it is gone
            await worker.call("close", {"number": number}, self.timeout_seconds)

    async def _wait_closed(self, seconds: float) -> None:
        if self._closing:
            await asyncio.wait(self._closing, timeout=seconds)

    def __exit__(self, *error: object) -> None:
        """End all, once the environments that were left are closed, or their time for it is over."""
        try:
            self._run(self._wait_closed(self.timeout_seconds if error[0] is None else FAILED_SECONDS))
        finally:
            self.close()


def load_environments(rollout: Rollout, reward: Reward) -> EnvironmentPool:
    """Return the workers of the environment or tools that `rollout` names.

    Args:
        reward: its functions' limits apply to environments, too.
    Raises:
        EnvironmentFault: the file cannot be imported, or defines no such class.
    """
    if rollout.environment is not None:
        found = parse_spec(rollout.environment, "rollout.environment", {})
        spec, code = rollout.environment, [found.module or found.file, found.name]
    else:
        tools = [parse_spec(tool, "rollout.tools", {}) for tool in rollout.tools]
        functions = [(found.module or found.file, found.name) for found in tools]
        spec = f"of tools {', '.join(rollout.tools)}"
        code = ["megappo.engines.tool_calls", "tool_environment", functions, rollout.tool_call_parser]
    return EnvironmentPool(
        spec,
        code,
        num_workers=rollout.num_environment_workers,
        timeout_seconds=rollout.environment_timeout_seconds,
        memory_limit_gib=reward.memory_limit_gib,
        pass_env=reward.pass_env,
    )
