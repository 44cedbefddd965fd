"""Sample responses with the engines of all ranks, and have them scored."""

import asyncio
import copy
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from megappo.batch.exchange import Exchange
from megappo.config.config_error import ConfigError
from megappo.config.eval_sets import TRAINING
from megappo.config.schema import Config
from megappo.config.score_checks import late_scores_errors
from megappo.data.prompts import Prompt
from megappo.data.tokenizer import showing_special
from megappo.engines.client import EngineClient, SamplingParams
from megappo.engines.generations import SentImages
from megappo.engines.handle import EngineHandle
from megappo.engines.restarts import EngineRestarts
from megappo.observe.observer import NullObserver, Observer
from megappo.placement.components import replayed_policy
from megappo.placement.run_plan import RunPlan
from megappo.rollouts.agent_runner import AgentRunner
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.episodes import EpisodeRunner
from megappo.rollouts.responses import Responses, warn_of_lost
from megappo.rollouts.sample_rows import Prompts, Sample
from megappo.rollouts.sampler import RolloutSession, SharedPrompts, grouped, store_counter
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.interruption import INTERRUPTION, Interrupted
from megappo.runtime.listening import run_store
from megappo.userland.agent_sessions import AgentPool
from megappo.userland.environments import TaskWorkers

NO_WORKERS = TaskWorkers()
IMAGE_TOKENS = re.compile(r"(<\|image_pad\|>)+")
"""Tokens of an image, as the models with vision have them."""


class Rollouts:
    """Samples responses with the engines of all ranks. All ranks call it together; ranks without an engine only join
    the exchanges.

    Args:
        restarts: has this rank's engine.
        workers: this rank's reward functions and environments of each task; none on ranks without an engine.
        num_engines: engines of all ranks.
    Attributes:
        images: images of the prompts; None for a model without vision.
        tokenizer: decodes responses; a copy of its own, as a tokenizer serves one thread at a time.
        hold: while `sample` runs, nothing else sends the engines requests.
        training, greedy: how responses for training, and for greedy baselines, are sampled.
    """

    def __init__(
        self,
        config: Config,
        datasets: Datasets,
        restarts: EngineRestarts,
        exchange: Exchange,
        *,
        workers: Mapping[str, TaskWorkers],
        num_engines: int,
    ):
        self.config = config
        self.exchange = exchange
        self.restarts = restarts
        self.num_engines = num_engines
        self.images = datasets.images
        self._workers = workers
        tokenizer = datasets.tokenizer
        self.tokenizer = copy.deepcopy(tokenizer if config.reward.skip_special_tokens else showing_special(tokenizer))
        rewards = self._workers_of(TRAINING).rewards
        if errors := late_scores_errors(config, waits_for_all=rewards is not None and rewards.waits_for_all):
            raise ConfigError(*errors)
        rollout = config.rollout
        self.params = partial(SamplingParams, stop_token_ids=datasets.stop_token_ids)
        sampling = rollout.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k
        self.training = self.params(*sampling, replayed=replayed_policy(config))
        self.greedy = self.params(rollout.max_response_length, temperature=0.0)
        self.hold: Callable[[], AbstractContextManager[None]] = nullcontext
        self._store = run_store()
        self._num_counters = 0

    @property
    def client(self) -> EngineClient | None:
        """Client of this rank's engine, which must be up; None on ranks without one."""
        return self.restarts.engine_handle.client

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        *,
        task: str = TRAINING,
    ) -> Responses:
        """Return this rank's share of n responses to each prompt.

        Prompts that a failed engine left unanswered are sampled again after its restart.

        Args:
            task: its environment and reward function are used.
        Raises:
            Interrupted: a rank is to end; the responses so far are lost.
            EngineError: an engine refused a request, or failed too often.
        """
        with self.hold():
            responses = self.new_responses(prompts, task)
            on_group = self._group_handler(responses, n)
            longest = max([self.config.data.max_prompt_length, *(len(prompt.tokens) for prompt in prompts)])
            remaining = [(i, prompt.tokens) for i, prompt in enumerate(prompts)]
            while remaining:
                source = SharedPrompts(remaining, n, self.new_counter())
                fault = None
                if self.client is not None:
                    session = RolloutSession(
                        *(source, n, params, self.client),
                        max_running_requests=self.config.rollout.max_running_requests,
                        most_open=n * (len(remaining) // self.num_engines),
                        usage=responses.usage,
                        on_sample=grouped(n, on_group),
                        runner=self.episode_runner(prompts, params, task, longest),
                        images=self.sent_images(prompts),
                    )
                    fault = session.run(self.is_interrupted)
                raise_if_interrupted(self.exchange)
                if not self.restarts.restart_after_rollout(fault):
                    break
                finished = set().union(*self.exchange.all_gather({one.prompt_index for one in responses.samples}))
                remaining = [prompt for prompt in remaining if prompt[0] not in finished]
            responses.end()
            warn_of_lost(responses.samples)
            return responses

    def _group_handler(self, responses: Responses, n: int) -> Callable[[Sequence[Sample]], None]:
        count_finished = self.new_counter()
        total = n * len(responses.prompts)
        num_tokens = 0

        def on_group(group: Sequence[Sample]) -> None:
            nonlocal num_tokens
            positions = responses.add(group)
            num_finished = n * (count_finished(1) + 1)
            num_tokens += sum(one.num_policy_tokens for one in group)
            # The other engines' tokens are taken to be as many per response as this one's.
            heartbeat.count(num_finished, total, "responses", num_tokens * num_finished / positions.stop)

        return on_group

    def new_responses(self, prompts: Prompts, task: str = TRAINING) -> Responses:
        """Return an empty collection of responses, scored by the task's reward function."""
        own = () if self.images is None else (self.images.columns,)
        return Responses(prompts, self._workers_of(task).rewards, self.tokenizer, *own)

    def sent_images(self, prompts: Prompts) -> Callable[[int], Awaitable[SentImages]] | None:
        """Return what reads the images of the prompt with an index, in a thread; None for a model without vision."""
        if (images := self.images) is None:
            return None
        return lambda index: asyncio.to_thread(images.sent, prompts[index])

    def prompt_text(self, tokens: Sequence[int]) -> str:
        """Return a prompt for people, with one token for each image."""
        return IMAGE_TOKENS.sub(r"\1", self.tokenizer.decode(tokens))

    def new_counter(self) -> Callable[[int], int]:
        """Return a `store_counter` that is the same on all ranks, if all ranks call this together."""
        self._num_counters += 1
        return store_counter(self._store, f"rollouts/{self._num_counters}")

    def episode_runner(
        self,
        prompts: Prompts,
        params: SamplingParams,
        task: str = TRAINING,
        longest_prompt: int | None = None,
    ) -> EpisodeRunner | None:
        """Return what plays episodes from these prompts; None if the task has single responses.

        Args:
            longest_prompt: most tokens of a prompt; None: data.max_prompt_length.
        """
        workers = self._workers_of(task)
        lengths = params.max_response_length, longest_prompt or self.config.data.max_prompt_length
        if workers.environments is None:
            return None
        arguments = prompts, workers.environments, self.config, self.tokenizer, *lengths
        if isinstance(workers.environments, AgentPool):
            is_taught = (
                task == TRAINING and self.config.teachers and self.config.distillation.without_teacher == "error"
            )
            needs_reward = workers.rewards is None and not (self.config.has_reward_model or is_taught)
            return AgentRunner(*arguments, needs_reward=needs_reward)
        return EpisodeRunner(*arguments)

    def for_thread(self) -> "Rollouts":
        """Return a copy for another thread, with a tokenizer of its own."""
        other = copy.copy(self)
        other.tokenizer = copy.deepcopy(self.tokenizer)
        return other

    def _workers_of(self, task: str) -> TaskWorkers:
        return self._workers.get(task, NO_WORKERS)

    def is_interrupted(self) -> bool:
        """Return whether any rank that owns an engine is to end."""
        if INTERRUPTION.reason:
            self._store.set("interrupted", INTERRUPTION.reason)
        return self._store.check(["interrupted"])


def make_rollouts(
    plan: RunPlan,
    engine_handle: EngineHandle,
    datasets: Datasets,
    exchange: Exchange,
    observer: Observer | NullObserver,
) -> Rollouts:
    """Return the rollouts of a run, and with them what restarts its engines."""
    restarts = EngineRestarts(engine_handle, exchange, observer.message, plan.config.rollout.max_engine_restarts)
    num_engines = plan.layouts["rollout"].data if plan.config.recipe.has_rollouts else 0
    workers = engine_handle.workers
    return Rollouts(
        plan.config,
        datasets,
        restarts,
        exchange,
        workers=workers,
        num_engines=num_engines,
    )


def raise_if_interrupted(exchange: Exchange) -> None:
    """Raise on all ranks if any rank is to end; all ranks call it together.

    Raises:
        Interrupted: with the first rank's reason.
    """
    reasons = [reason for reason in exchange.all_gather(INTERRUPTION.reason) if reason]
    if reasons:
        raise Interrupted(reasons[0])
