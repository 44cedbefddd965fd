"""Environments spread over worker processes: user code can neither hang nor crash the trainer."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from typing import Any

from megappo.config.rollout_section import Rollout
from megappo.config.schema import Reward
from megappo.runtime.heartbeat import LIFE
from megappo.userland.environment_process import EnvironmentFault, Worker
from megappo.userland.forms import Takes
from megappo.userland.spec import parse_spec

START_TIMEOUT_SECONDS = 120.0
"""How long a worker may take to import the user's file."""
FAILED_SECONDS = 5.0
"""How long a run that fails waits for environments to be closed."""
OWED_SECONDS = 0.01
"""Between two looks whether environments are still to be closed."""
Messages = list[dict[str, str]]


class Environment:
    """One episode's, in a worker.

    Args:
        tell: makes an error of the user's code one that names it.
    """

    def __init__(self, worker: Worker, number: int, tell: Callable[[EnvironmentFault], EnvironmentFault]):
        self._worker, self._number, self._tell = worker, number, tell

    async def reset(self, row: Mapping[str, Any]) -> Messages:
        """Begin; what it has to say first, after the prompt.

        Raises: as `step`.
        """
        return await self._ask("reset", row)

    async def step(self, message: Mapping[str, Any]) -> tuple[Messages, float | list[float], bool, dict[str, float]]:
        """Its answer to the policy's message, the reward of the turn (or of each token), whether the episode ends, and
        further numbers to be told.

        Raises:
            EpisodeLost: it takes too long, or its process ended.
            EnvironmentFault: it raised, or returned something of the wrong type.
        """
        observation, reward, done, told = await self._ask("step", message)
        num_tokens = len(message["token_ids"])
        if isinstance(reward, list) and len(reward) != num_tokens:
            wrong = f"step returned {len(reward)} rewards for a turn of {num_tokens} tokens; expected as many, or one"
            raise self._tell(EnvironmentFault(wrong))
        return observation, reward, done, told

    async def _ask(self, method: str, argument: Mapping[str, Any]) -> Any:
        try:
            return await self._worker.ask(self._number, method, argument)
        except EnvironmentFault as error:
            raise self._tell(error) from error


def load_environments(rollout: Rollout, reward: Reward) -> "EnvironmentPool":
    """The workers of what `rollout` names, environment or tools, once they have loaded it.

    Args:
        reward: its functions' limits hold for environments, too.
    Raises:
        EnvironmentFault: the file cannot be imported, or defines no such class.
    """
    if rollout.environment is not None:
        found = parse_spec(rollout.environment, "rollout.environment", {})
        spec, words = rollout.environment, [found.module or found.file, found.name]
    else:
        tools = [parse_spec(tool, "rollout.tools", {}) for tool in rollout.tools]
        functions = [(found.module or found.file, found.name) for found in tools]
        spec = f"of tools {', '.join(rollout.tools)}"
        words = ["megappo.engines.tool_calls", "tool_environment", json.dumps([functions, rollout.tool_call_parser])]
    return EnvironmentPool(
        spec,
        words,
        num_workers=rollout.num_environment_workers,
        timeout_seconds=rollout.environment_timeout_seconds,
        memory_limit_gib=reward.memory_limit_gib,
        pass_env=reward.pass_env,
    )


class EnvironmentPool(AbstractContextManager):
    """The workers of an environment; usable as a context manager.

    Keep it in the thread that made it: the kernel ends the workers together with that thread, so they never outlive the
    trainer, however it ends.

    Args:
        spec: for messages.
        words: what the workers are to load, see `worker`.
        num_workers: processes.
        timeout_seconds: how long a call may take.
        memory_limit_gib, pass_env: as of `rewards.pool.load_reward`.
    Attributes:
        takes: what it takes of a record, and offers the policy.
    """

    def __init__(
        self,
        spec: str,
        words: Sequence[str],
        *,
        num_workers: int,
        timeout_seconds: float,
        memory_limit_gib: float | None = None,
        pass_env: Collection[str] = (),
    ):
        self.spec, self._seconds = spec, timeout_seconds
        self._start = partial(Worker, words, timeout_seconds, memory_limit_gib, pass_env)
        self._numbers = itertools.count()
        self._workers = [self._start() for _ in range(num_workers)]
        loaded = [self._loaded(worker) for worker in self._workers][0]
        takes = loaded["takes"]
        welcome = None if takes["welcome"] is None else tuple(takes["welcome"])
        needed = tuple(takes["needed"])
        self.takes = Takes(needed, welcome, takes["raw_prompts"], by_environment=needed, tools=tuple(loaded["tools"]))

    def _loaded(self, worker: Worker) -> dict[str, Any]:
        try:
            return worker.wait_ready(START_TIMEOUT_SECONDS)
        except EnvironmentFault as error:
            self.close()
            raise self._named(error) from error

    def _named(self, error: EnvironmentFault) -> EnvironmentFault:
        return EnvironmentFault(f"environment {self.spec} {error}\nfix it, or choose another one")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Inside, the running event loop may have environments."""
        self._mending = asyncio.Lock()
        for worker in self._workers:
            if worker.is_up:
                worker.attach()
        try:
            yield
        finally:
            for worker in self._workers:
                worker.detach()

    @asynccontextmanager
    async def environment(self) -> AsyncIterator[Environment]:
        """A new one, in the worker that has fewest."""
        worker, number = await self._worker(), next(self._numbers)
        worker.num_episodes += 1
        try:
            yield Environment(worker, number, self._named)
        finally:
            worker.num_episodes -= 1
            worker.leave(number)

    async def _worker(self) -> Worker:
        async with self._mending:
            for place, worker in enumerate(self._workers):
                if not worker.is_up:
                    self._workers[place] = await self._another()
                    await asyncio.to_thread(worker.end, 0.0)
        return min(self._workers, key=lambda worker: worker.num_episodes)

    async def _another(self) -> Worker:
        new = self._start()  # by this thread, with which it ends
        try:
            await asyncio.to_thread(self._loaded, new)
            new.attach()
        except BaseException:  # cancelled, too
            new.stop()
            new.end(0.0)
            raise
        return new

    def close(self, timeout_seconds: float = 0.0) -> None:
        """End all workers and what they started. May be called again."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.end(timeout_seconds)

    def __exit__(self, *error: object) -> None:
        """End all, once the environments that were left are closed, or their time for it is over."""
        limit = time.monotonic() + (self._seconds if error[0] is None else FAILED_SECONDS)
        try:
            with LIFE.waiting():
                while [worker for worker in self._workers if worker.owes()] and time.monotonic() < limit:
                    time.sleep(OWED_SECONDS)
        finally:
            self.close()
