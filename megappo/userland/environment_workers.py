"""Users' code in worker processes: what answers and scores the responses to the prompts of each task."""

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any

from megappo.config.eval_sets import Task
from megappo.userland.environment_pool import EnvironmentPool, load_environments
from megappo.userland.forms import NOTHING, Takes
from megappo.userland.pool import RewardPool, load_configured


@dataclass(frozen=True)
class Workers:
    """Of a task, each where it has one: those of its reward function, and of its environment."""

    rewards: RewardPool | None = None
    environments: EnvironmentPool | None = None

    @property
    def takes(self) -> Takes:
        """What both take of records."""
        return reduce(or_, [one.takes for one in (self.rewards, self.environments) if one is not None], NOTHING)


def start_workers(
    tasks: Mapping[str, Task],
    cleanup: ExitStack,
    noting: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Workers]:
    """The workers of each task, by its name; those that name the same function, or environment, share theirs.

    Args:
        noting: of the key that names what is started in it; what it does not raise leaves the task without.
    Raises:
        RewardError, EnvironmentFault: the user's file cannot be loaded.
    """
    found: dict[Hashable, Any] = {}

    def shared(named: Hashable, key: str, load: Callable[[], AbstractContextManager[Any]]) -> Any:
        if named not in found:
            found[named] = None
            with noting(key):
                found[named] = cleanup.enter_context(load())
        return found[named]

    workers = {}
    for name, task in tasks.items():
        rewards = environments = None
        if functions := tuple(task.reward.weights.items()):
            rewards = shared(functions, task.reward_key, partial(load_configured, task.reward))
        if task.rollout.has_environment:
            named = (task.rollout.environment, task.rollout.tools)
            environments = shared(named, task.environment_key, partial(load_environments, task.rollout, task.reward))
        workers[name] = Workers(rewards, environments)
    return workers
