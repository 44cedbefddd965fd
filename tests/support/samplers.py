"""Sampling of groups for training by one engine, as a step does it."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.engines.client import EngineClient
from megappo.engines.generations import SamplingParams
from megappo.rollouts.group_queue import GroupQueue
from megappo.rollouts.group_sampler import GroupSampler
from megappo.rollouts.journal import Choice, Group, NoJournal
from megappo.rollouts.rank_groups import RankGroups, SharedCounts
from megappo.rollouts.responses import Responses


def queue_config(size: int, draw_size: int | None = None, max_staleness: int = 0, n: int = 2, **filters: Any) -> Config:
    """Return a config of 200 steps; `filters` are keys of algorithm.filter_groups, which they turn on."""
    groups = {"enable": True} | filters if filters else {}
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "placement": {"actor": "0", "rollout": "0"},
            "data": {"train_files": ["f"], "train_batch_size": size, "gen_batch_size": draw_size},
            "trainer": {"output_dir": "o", "total_steps": 200},
            "rollout": {"n": n, "max_staleness": max_staleness, "max_running_requests": 8},
            "algorithm": {"adv_estimator": "grpo", "filter_groups": groups},
        }
    )


class Engine:
    """The sampler of one of `num_engines` engines, and the queue as its rank sees it."""

    def __init__(
        self,
        config: Config,
        client: EngineClient,
        params: SamplingParams,
        runner: object = None,
        *,
        store: dist.Store | None = None,
        num_engines: int = 1,
    ):
        self.config = config
        self.queue = GroupQueue(config)
        self.shared = SharedCounts(store or dist.HashStore(), config.data.draw_size)
        self.groups = RankGroups(self.shared, NoJournal())
        rollouts = SimpleNamespace(
            config=config,
            client=client,
            num_engines=num_engines,
            training=params,
            new_responses=lambda prompts: Responses(prompts, None, None),
            episode_runner=lambda prompts, params: runner,
            sent_images=lambda prompts: None,
        )
        rollouts.for_thread = lambda: rollouts
        self.sampler = GroupSampler(rollouts, self.shared, self.queue, self.groups)

    def admit(self, step: int, draw: Callable[[], Sequence[tuple[int, Prompt]]]) -> None:
        """Begin a step."""
        self.sampler.begin_step(step - 1)
        self.queue.admit(step, draw)

    def choose(self, step: int) -> Choice:
        """Return the groups of a step, as soon as there are enough."""
        waiting = self.queue.num_waiting()
        deadline = time.monotonic() + 100
        while not self.queue.has_enough(waiting, *(self.shared.total(kind, waiting) for kind in ("finished", "equal"))):
            assert time.monotonic() < deadline and self.sampler.fault is None and self.sampler.error is None
            time.sleep(0.01)
        self.queue.finished = sorted(self.groups.finished())
        return self.queue.choose(step)

    def take(self, choice: Choice) -> tuple[list[Group], list[Group]]:
        """Return the groups that a step trains on, and the groups that it drops."""
        dropped = self.sampler.drop(set(choice.left_out))
        taken = self.groups.remove(choice.chosen)
        self.queue.remove(choice)
        if not self.config.rollout.max_staleness:
            self.sampler.rest()
        return taken, dropped
