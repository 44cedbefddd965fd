"""Spread prompts over engines: each engine takes the next prompts when it has room, so a fast engine takes more."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from megappo.engines.client import EngineClient
from megappo.engines.generations import EngineFault, Generation, SamplingParams
from megappo.observe.metrics import Metric
from megappo.rollouts.episodes import EpisodeRunner
from megappo.rollouts.sample_rows import Sample, response_sample
from megappo.runtime.heartbeat import heartbeat

GATHERING_SECONDS = 0.005
"""Delay between a finished response and the request that takes its place: responses that the same batch of the engine
finishes are replaced by one request."""
INTERRUPT_POLL_SECONDS = 0.5
EARLY_STOP_POLL_SECONDS = 0.1
HOLD_POLL_SECONDS = 0.05
EPISODES_PER_SLOT = 4
"""Open episodes per sequence that an engine decodes at once: most of them may be waiting for their environments."""
IndexedPrompts = Sequence[tuple[int, list[int]]]
"""(prompt_index, token ids) of each prompt."""


@dataclass
class EngineUsage:
    """Work of an engine in one or more sessions.

    Attributes:
        seconds: since the first request. sequence_seconds: the seconds of all sequences, added up.
        prompt_tokens: of finished sequences. cached_tokens: those of them that the engine had in its cache.
        written_tokens: of all sequences, also of aborted ones.
        idle_seconds: those of `seconds` without a sequence.
    """

    seconds: float = 0.0
    sequence_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    idle_seconds: float = 0.0

    def since(self, earlier: "EngineUsage") -> "EngineUsage":
        """Return the work after an earlier copy."""
        return EngineUsage(**{name: value - getattr(earlier, name) for name, value in asdict(self).items()})

    def metrics(self) -> dict[str, Metric]:
        """Return this rank's part of the metrics of all engines; empty if its engine finished nothing."""
        if not self.prompt_tokens:
            return {}
        return {
            "rollout/running_requests": Metric((self.sequence_seconds, self.seconds), "mean"),
            "rollout/cached_prompt_frac": Metric((self.cached_tokens, self.prompt_tokens), "mean"),
        }


def store_counter(store: dist.Store, key: str) -> Callable[[int], int]:
    """Return a counter that all ranks share: it adds `count` and returns the total before. `key` must be new."""
    return lambda count: store.add(key, count) - count


def first_error(error: BaseException) -> BaseException:
    """Return the first error of a group of tasks that ended together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class PromptSource(Protocol):
    """Gives each engine the prompts that it samples responses to next."""

    async def take(self, most: int) -> IndexedPrompts:
        """Return the next prompts, at least one and at most so many; none once there are no more."""

    @property
    def is_held(self) -> bool:
        """True while the engine is to get no further request."""


@dataclass(frozen=True)
class SharedPrompts:
    """Some prompts, each of which goes to one engine.

    Args:
        counter: a `store_counter` of the prompts that have been taken, shared by all engines.
    """

    prompts: IndexedPrompts
    counter: Callable[[int], int]
    is_held = False

    async def take(self, most: int) -> IndexedPrompts:
        first = self.counter(most)
        return self.prompts[first : first + most]


@dataclass
class RolloutSession:
    """Sampling of n responses to each prompt that this process's engine takes from a source.

    Every process that owns an engine opens a session at the same time. Together they sample each response once, in no
    particular order.

    Args:
        max_running_requests: sequences that the engine decodes at once.
        most_open: responses, or episodes, in progress at once; None: as many as keep the engine busy.
        usage: this session's work is added to it.
        on_group: receives all samples of a prompt as soon as the last of them is finished.
        runner: plays episodes instead of sampling single responses. It may raise errors of the environment.
    """

    source: PromptSource
    n: int
    params: SamplingParams
    client: EngineClient
    _: KW_ONLY
    max_running_requests: int
    most_open: int | None = None
    usage: EngineUsage
    on_group: Callable[[Sequence[Sample]], object]
    runner: EpisodeRunner | None = None

    def __post_init__(self) -> None:
        limit = self.max_running_requests * (1 if self.runner is None else EPISODES_PER_SLOT)
        most_open = limit if self.most_open is None else min(limit, self.most_open)
        self._num_free = max(self.n, most_open)  # further responses that may begin
        self._has_room = asyncio.Event()
        self._slots = asyncio.Semaphore(self.max_running_requests)  # turns of episodes that the engine decodes at once
        self._num_running, self._since = 0, time.perf_counter()
        self._stopping = False

    def run(
        self, is_interrupted: Callable[[], bool] = lambda: False, early_stop: Callable[[], bool] | None = None
    ) -> EngineFault | None:
        """Do what `run_async` does, in an event loop of its own."""
        with heartbeat.waiting():
            return asyncio.run(self.run_async(is_interrupted, early_stop))

    async def run_async(
        self, is_interrupted: Callable[[], bool] = lambda: False, early_stop: Callable[[], bool] | None = None
    ) -> EngineFault | None:
        """Sample until all prompts are taken and this engine's are answered; return its fault if it fails.

        Args:
            is_interrupted: polled; True ends the session at once, whatever the engine is doing.
            early_stop: polled; True ends the session when the engine has aborted its requests and is idle.
        Raises:
            EngineError: the engine refused a request, or exceeded the time limit of one.
        """
        try:
            await self._run(is_interrupted, early_stop)
        except ExceptionGroup as group:
            error = first_error(group)
            if not isinstance(error, EngineFault):
                raise error from None
            return error
        return None

    async def _run(self, is_interrupted: Callable[[], bool], early_stop: Callable[[], bool] | None) -> None:
        poll_seconds = INTERRUPT_POLL_SECONDS if early_stop is None else EARLY_STOP_POLL_SECONDS
        async with self.client.open_async() as http, asyncio.TaskGroup() as tasks:
            requests = tasks.create_task(self._request_all(http))
            health = tasks.create_task(self.client.watch(http))
            while not requests.done():
                if is_interrupted():
                    requests.cancel()
                elif early_stop is not None and early_stop():
                    self._stopping = True
                    await self.client.abort_all(http, lambda: not self._num_running)
                    requests.cancel()
                await asyncio.wait([requests], timeout=poll_seconds)
            health.cancel()

    async def _request_all(self, http: Any) -> None:
        """Request as many prompts as there is room for until all prompts are taken; then wait for the responses."""
        async with asyncio.TaskGroup() as requests:
            while not self._stopping:
                taken = await self.source.take(self._num_free // self.n)
                if not taken:
                    return
                self._num_free -= self.n * len(taken)
                if self.runner is not None:
                    for index, _ in taken:
                        requests.create_task(self._play(http, self.runner, index))
                else:
                    requests.create_task(self._answer(http, taken))
                while self._num_free < self.n:
                    self._has_room.clear()
                    await self._has_room.wait()
                await asyncio.sleep(GATHERING_SECONDS)

    async def _answer(self, http: Any, taken: IndexedPrompts) -> None:
        """Sample all responses to these prompts in one request."""
        repeated = [tokens for _, tokens in taken for _ in range(self.n)]
        groups: list[list[Sample]] = [[] for _ in taken]
        self._add_running(len(repeated))
        async with contextlib.aclosing(self.client.generate_async(http, repeated, self.params)) as responses:
            async for position, response in responses:
                number, order = divmod(position, self.n)
                index, prompt = taken[number]
                if self._is_complete(response, prompt):
                    groups[number].append(response_sample(index, order, prompt, response))
                    if len(groups[number]) == self.n:
                        self.on_group(groups[number])
                self._add_running(-1)
                self._free_one()

    async def _play(self, http: Any, runner: EpisodeRunner, index: int) -> None:
        """Play n episodes from a prompt, all at once."""

        async def play_one(order: int) -> Sample:
            try:
                return await runner.play(index, order, partial(self._generate_turn, http))
            finally:
                self._free_one()

        async with asyncio.TaskGroup() as episodes:
            tasks = [episodes.create_task(play_one(order)) for order in range(self.n)]
        self.on_group([task.result() for task in tasks])

    async def _generate_turn(self, http: Any, context: list[int], max_tokens: int) -> Generation:
        params = replace(self.params, max_response_length=max_tokens)
        async with self._slots:
            if self._stopping:
                await _wait_for_cancellation()
            while self.source.is_held:
                await asyncio.sleep(HOLD_POLL_SECONDS)
            self._add_running(1)
            try:
                async with contextlib.aclosing(self.client.generate_async(http, [context], params)) as responses:
                    [(_, response)] = [one async for one in responses]
            finally:
                self._add_running(-1)
        if not self._is_complete(response, context):
            await _wait_for_cancellation()
        return response

    def _is_complete(self, response: Generation, prompt: list[int]) -> bool:
        """Count a response's tokens; return whether it has ended by itself, not by an abort."""
        self.usage.written_tokens += len(response.tokens)
        if response.finish_reason == "abort":
            return False
        self.usage.prompt_tokens += len(prompt)
        self.usage.cached_tokens += response.num_cached
        return True

    def _free_one(self) -> None:
        self._num_free += 1
        self._has_room.set()

    @property
    def is_idle(self) -> bool:
        """True while the engine decodes nothing for this session."""
        return self._num_running == 0

    def count_time(self) -> None:
        """Add the time since the last change to the usage."""
        self._add_running(0)

    def _add_running(self, count: int) -> None:
        """Change the number of sequences that the engine decodes, and account for the time since the last change."""
        now = time.perf_counter()
        self.usage.seconds += now - self._since
        if self.is_idle:
            self.usage.idle_seconds += now - self._since
        self.usage.sequence_seconds += self._num_running * (now - self._since)
        self._num_running, self._since = self._num_running + count, now


async def _wait_for_cancellation() -> None:
    """Wait forever: the session is about to cancel this episode."""
    await asyncio.get_running_loop().create_future()
