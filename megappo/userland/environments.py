"""Environments in worker processes, many in each: user code can neither hang nor crash the trainer.

The workers of a task run its environment, which answers the responses, or its reward function.
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from megappo.config.eval_sets import Task
from megappo.config.schema import Reward
from megappo.config.sections import Rollout
from megappo.errors import ActionableError
from megappo.runtime.heartbeat import heartbeat
from megappo.userland.grades import MAX_NAME_CHARACTERS, fits_float32
from megappo.userland.rewards import RewardPool
from megappo.userland.signatures import NO_INPUT, PROMPTS, InputSpec, is_message
from megappo.userland.spec import parse_spec
from megappo.userland.user_code import JsonObject
from megappo.userland.worker_process import CallError, WorkerPool, WorkerProcess

FAILED_SECONDS = 5.0
"""Time that a failed run waits for environments to be closed."""
Messages = list[dict[str, str]]


class EnvironmentFault(ActionableError, RuntimeError):
    """An environment's code is wrong; the run ends."""


class EpisodeLost(Exception):
    """An environment took too long, or its process ended. Its episode cannot continue; the others do."""


def row_of(columns: JsonObject, label: Any) -> JsonObject:
    """Return the fields of a prompt's record that an environment is reset with."""
    own = {name: value for name, value in columns.items() if name != PROMPTS}
    return own | {"prompt": columns[PROMPTS], "label": label}


class Replacement(list[dict[str, str]]):
    """Messages of an environment in place of the whole conversation."""


class Environment:
    """The environment of one episode."""

    def __init__(self, pool: "EnvironmentPool", worker: WorkerProcess, number: int):
        self._pool = pool
        self._worker = worker
        self._number = number

    async def reset(self, row: JsonObject) -> Messages:
        """Begin the episode; return the environment's first messages, after the prompt.

        Raises: as in `step`.
        """
        answer = await self._call("reset", {"row": row})
        try:
            return _messages(answer)
        except ValueError as error:
            raise self._pool.fault(f"reset returned {error}") from error

    async def step(self, message: JsonObject) -> tuple[Messages, float | list[float], bool, dict[str, float]]:
        """Return the environment's answer to the policy's message, the reward of the turn (or of each token), whether
        the episode ends, and further numbers by name.

        Raises:
            EpisodeLost: it takes too long, or its process ended.
            EnvironmentFault: it raised, or returned something of the wrong type.
        """
        answer = await self._call("step", {"message": message})
        try:
            return _turn(answer, len(message["token_ids"]))
        except ValueError as error:
            raise self._pool.fault(f"step returned {error}") from error

    async def _call(self, method: str, arguments: JsonObject) -> Any:
        call = self._worker.call(method, {"number": self._number, **arguments}, self._pool.timeout_seconds)
        try:
            return await self._pool.in_thread(call)
        except CallError as error:
            if error.is_late or not self._worker.is_up:
                raise EpisodeLost(f"{method} {error}") from error
            raise self._pool.fault(f"{method} {error}") from error


def _messages(observation: Any) -> Messages:
    """Return an observation as messages: none for None, one of the user's for a text, a `Replacement` for
    {"replace": messages}."""
    if observation is None:
        return []
    if isinstance(observation, dict) and [*observation] == ["replace"] and observation["replace"]:
        return Replacement(_messages(observation["replace"]))
    if isinstance(observation, str):
        observation = {"role": "user", "content": observation}
    messages = [observation] if isinstance(observation, dict) else observation
    if not isinstance(messages, list) or not all(map(is_message, messages)):
        expected = "a text, None, messages {'role': str, 'content': str}, or {'replace': messages} with at least one"
        raise ValueError(f"the observation {observation!a:.200}; expected {expected}")
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a character
        raise ValueError(f"the observation {observation!a:.200}, which is no text: {error}") from error
    return messages


def _turn(answer: Any, num_tokens: int) -> tuple[Messages, float | list[float], bool, dict[str, float]]:
    """Return what a step returned, checked."""
    match answer:
        case [observation, reward, bool(done)]:
            numbers: JsonObject = {}
        case [observation, reward, bool(done), dict(numbers)]:
            pass
        case _:
            expected = "(observation, reward, done), and maybe a dictionary of numbers"
            raise ValueError(f"{answer!r:.200}; expected {expected}; done is True or False")
    rewards = [_number(one) for one in reward] if isinstance(reward, list) else _number(reward)
    if isinstance(rewards, list) and len(rewards) != num_tokens:
        raise ValueError(f"{len(rewards)} rewards for a turn of {num_tokens} tokens; expected as many, or one")
    parts = {name[:MAX_NAME_CHARACTERS]: _number(number) for name, number in numbers.items()}
    return _messages(observation), rewards, done, parts


def _number(reward: Any) -> float:
    number = 0.0 if reward is None else reward
    if not fits_float32(number):
        expected = "a finite number, None for 0, or a list of one for each token of the turn"
        raise ValueError(f"the reward {reward!r:.80}; expected {expected}")
    return float(number)


class EnvironmentPool(WorkerPool):
    """The workers of an environment, which may be used as a context manager.

    Args:
        spec: the environment's name, for messages.
        code: source and name of the environment, and a list of arguments, see `EnvironmentHost`.
        limits: further arguments of `WorkerPool`.
    Raises:
        EnvironmentFault: the file cannot be imported, or defines no such class.
    """

    kind = "environment"
    error = EnvironmentFault

    def __init__(self, spec: str, code: Sequence[Any], *, timeout_seconds: float, **limits: Any):
        source, name, *arguments = code
        hosted = {"source": source, "name": name, "arguments": arguments, "seconds": timeout_seconds}
        super().__init__(spec, "environments", hosted, timeout_seconds=timeout_seconds, **limits)
        self._numbers = itertools.count()
        self._replacing = asyncio.Lock()
        self._closing: set[Future] = set()
        self._num_episodes: Counter[WorkerProcess] = Counter()

    async def in_thread(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine that the pool's thread runs, with time limits of its own, to any other
        event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    @asynccontextmanager
    async def environment(self) -> AsyncIterator[Environment]:
        """Open a new environment in the worker with the fewest."""
        worker = await self.in_thread(self._free_worker())
        number = next(self._numbers)
        try:
            yield Environment(self, worker, number)
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
        """Close an environment, which nobody waits for."""
        self._num_episodes[worker] -= 1
        with suppress(CallError):  # it is gone
            await worker.call("close", {"number": number}, self.timeout_seconds)

    def __exit__(self, *error: object) -> None:
        """End all, once the environments that were left are closed, or their time for it is over."""
        try:
            with heartbeat.waiting():
                wait(list(self._closing), self.timeout_seconds if error[0] is None else FAILED_SECONDS)
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
        environment = parse_spec(rollout.environment, "rollout.environment", {})
        spec = rollout.environment
        code = [environment.source, environment.name]
    else:
        tools = [parse_spec(tool, "rollout.tools", {}) for tool in rollout.tools]
        functions = [(tool.source, tool.name) for tool in tools]
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


@dataclass(frozen=True)
class TaskWorkers:
    """The workers of a task's reward function and of its environment, where it has them."""

    rewards: RewardPool | None = None
    environments: EnvironmentPool | None = None

    @property
    def takes(self) -> InputSpec:
        """The fields of a record that both get."""
        rewards = NO_INPUT if self.rewards is None else self.rewards.takes
        return rewards if self.environments is None else rewards | self.environments.takes


def start_workers(
    tasks: Mapping[str, Task],
    cleanup: ExitStack,
    while_starting: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, TaskWorkers]:
    """Return the workers of each task by its name; tasks with the same function, or environment, share theirs.

    Args:
        while_starting: called with the config key of each worker pool; its context surrounds the start. If the context
            swallows an error, the task gets no such pool.
    Raises:
        RewardError, EnvironmentFault: a file cannot be loaded.
    """
    started: dict[Hashable, Any] = {}

    def shared(identity: Hashable, key: str, start: Callable[[], AbstractContextManager[Any]]) -> Any:
        if identity not in started:
            started[identity] = None
            with while_starting(key):
                started[identity] = cleanup.enter_context(start())
        return started[identity]

    workers = {}
    for name, task in tasks.items():
        rewards = environments = None
        if functions := tuple(task.reward.weights.items()):
            rewards = shared(functions, task.reward_key, partial(RewardPool, task.reward))
        if task.rollout.has_environment:
            identity = (task.rollout.environment, task.rollout.tools)
            environments = shared(identity, task.environment_key, partial(load_environments, task.rollout, task.reward))
        workers[name] = TaskWorkers(rewards, environments)
    return workers
