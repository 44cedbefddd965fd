"""Environments in worker processes, many in each: user code can neither hang nor crash the trainer.

The workers of a task run its environment, which answers the responses, or its reward function.
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from megappo.config.eval_sets import Task
from megappo.config.schema import Reward
from megappo.config.sections import PLAYERS, Rollout
from megappo.userland.agent_sessions import AgentPool, load_agent
from megappo.userland.episode_pool import EpisodePool, Session, episode_limits
from megappo.userland.grades import MAX_NAME_CHARACTERS, fits_float32
from megappo.userland.rewards import RewardPool
from megappo.userland.signatures import NO_INPUT, PROMPTS, InputSpec, is_message
from megappo.userland.spec import parse_spec
from megappo.userland.user_code import JsonObject

Messages = list[dict[str, str]]


def row_of(columns: JsonObject, label: Any) -> JsonObject:
    """Return the fields of a prompt's record that an environment is reset with."""
    own = {name: value for name, value in columns.items() if name != PROMPTS}
    return own | {"prompt": columns[PROMPTS], "label": label}


class Replacement(list[dict[str, str]]):
    """Messages of an environment in place of the whole conversation."""


class Environment(Session):
    """The environment of one episode."""

    async def reset(self, row: JsonObject) -> Messages:
        """Begin the episode; return the environment's first messages, after the prompt.

        Raises: as in `step`.
        """
        answer = await self.call("reset", {"row": row})
        try:
            return _messages(answer)
        except ValueError as error:
            raise self.pool.fault(f"reset returned {error}") from error

    async def step(self, message: JsonObject) -> tuple[Messages, float | list[float], bool, dict[str, float]]:
        """Return the environment's answer to the policy's message, the reward of the turn (or of each token), whether
        the episode ends, and further numbers by name.

        Raises:
            EpisodeLost: it takes too long, or its process ended.
            EnvironmentFault: it raised, or returned something of the wrong type.
        """
        answer = await self.call("step", {"message": message})
        try:
            return _turn(answer, len(message["token_ids"]))
        except ValueError as error:
            raise self.pool.fault(f"step returned {error}") from error


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


class EnvironmentPool(EpisodePool):
    """The workers of an environment, which may be used as a context manager.

    Args:
        spec: the environment's name, for messages.
        code: source and name of the environment, and a list of arguments, see `EnvironmentHost`.
        limits: further arguments of `WorkerPool`.
    Raises:
        EnvironmentFault: the file cannot be imported, or defines no such class.
    """

    kind = "environment"
    session_type = Environment

    def __init__(self, spec: str, code: Sequence[Any], *, timeout_seconds: float, **limits: Any):
        source, name, *arguments = code
        hosted = {"source": source, "name": name, "arguments": arguments, "seconds": timeout_seconds}
        super().__init__(spec, "environments", hosted, timeout_seconds=timeout_seconds, **limits)


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
    return EnvironmentPool(spec, code, **episode_limits(rollout, reward))


@dataclass(frozen=True)
class TaskWorkers:
    """The workers of a task's reward function and of its environment or agent, where it has them."""

    rewards: RewardPool | None = None
    environments: EnvironmentPool | AgentPool | None = None

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
        if task.rollout.has_episodes:
            identity = tuple(getattr(task.rollout, player) for player in PLAYERS)
            load = load_agent if task.rollout.has_agent else load_environments
            environments = shared(identity, task.environment_key, partial(load, task.rollout, task.reward))
        workers[name] = TaskWorkers(rewards, environments)
    return workers
