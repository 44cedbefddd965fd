"""The workers of each task: its environment answers the responses, its reward function scores them."""

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from megappo.config.eval_sets import Task
from megappo.userland.environments import EnvironmentPool, load_environments
from megappo.userland.rewards import RewardPool
from megappo.userland.signatures import NO_INPUT, InputSpec


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
