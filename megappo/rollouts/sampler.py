"""Spread prompts over engines: each engine takes the next ones when it has room, so a fast engine takes more."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch.distributed as dist

from megappo.engines.client import EngineClient
from megappo.engines.generations import EngineFault, Generation, SamplingParams, SentImages
from megappo.observe.metrics import Metric
from megappo.rollouts.episodes import EpisodeRunner
from megappo.rollouts.sample_rows import Sample, response_sample
from megappo.runtime.heartbeat import heartbeat

GATHERING_SECONDS = 0.005
"""Delay between a finished response and the request that takes its place: responses that the same batch of the engine
finishes are replaced by one request."""
INTERRUPT_POLL_SECONDS = 0.5
HOLD_POLL_SECONDS = 0.05
EPISODES_PER_SLOT = 4
"""Open episodes per sequence that an engine decodes at once: most of them may be waiting for their environments."""
IndexedPrompts = Sequence[tuple[int, list[int]]]
"""(prompt_index, token ids) of each prompt."""


@dataclass
class EngineUsage:
    """Work of an engine in one or more sessions.

    Attributes:
        seconds: time since the first request. sequence_seconds: sum of the times of all sequences.
        prompt_tokens: prompt tokens of finished sequences. cached_tokens: prompt tokens that the engine had in its
            cache.
        written_tokens: tokens that the engine wrote for all sequences, including aborted ones.
        idle_seconds: part of `seconds` in which no sequence ran.
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

    @property
    def busy_frac(self) -> float:
        """Share of the time in which the engine had a sequence; 0 of an engine that has done nothing."""
        return 1 - self.idle_seconds / self.seconds if self.seconds else 0.0

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


class Request(NamedTuple):
    """A response that an engine is to write.

    Attributes:
        prompt_index, sample_index: as of `Sample`.
        prompt: its token ids.
        written: tokens of the response that an aborted request has written.
    """

    prompt_index: int
    sample_index: int
    prompt: list[int]
    written: Generation | None = None

    def with_written(self, response: Generation) -> "Request":
        """Return the request for the rest of the response, of which this request has written a part."""
        return self._replace(written=response if self.written is None else self.written + response)


class PromptSource(Protocol):
    """Gives each engine the responses that it writes next."""

    async def take(self, most: int) -> Sequence[Request]:
        """Return requests for the next responses, to one prompt or to several, but at most `most`; none once there are
        no more."""

    def put_back(self, request: Request) -> None:
        """Take back a request that was aborted."""

    @property
    def is_held(self) -> bool:
        """True while the engine is to get no further request."""


@dataclass(frozen=True)
class SharedPrompts:
    """n responses to each of some prompts, each of which goes to one engine.

    Args:
        counter: a `store_counter` of the prompts that have been taken, shared by all engines.
    """

    prompts: IndexedPrompts
    n: int
    counter: Callable[[int], int]
    is_held = False

    async def take(self, most: int) -> Sequence[Request]:
        count = max(1, most // self.n)
        first = self.counter(count)
        taken = self.prompts[first : first + count]
        return [Request(index, order, tokens) for index, tokens in taken for order in range(self.n)]

    def put_back(self, request: Request) -> None:
        """Fail: nothing aborts these requests.

        Raises:
            EngineFault: always.
        """
        raise EngineFault(f"the engine aborted its response to prompt {request.prompt_index} unasked")


def grouped(n: int, on_group: Callable[[Sequence[Sample]], object]) -> Callable[[Sample], None]:
    """Return an `on_sample` that passes on all n samples of a prompt as soon as it has the last of them."""
    groups = defaultdict[int, list[Sample]](list)

    def on_sample(sample: Sample) -> None:
        group = groups[sample.prompt_index]
        group.append(sample)
        if len(group) == n:
            on_group(groups.pop(sample.prompt_index))

    return on_sample


@dataclass
class RolloutSession:
    """Sampling of the responses that this process's engine takes from a source.

    Every process that owns an engine opens a session at the same time. Together they sample each response once, in no
    particular order.

    Args:
        max_running_requests: sequences that the engine decodes at once.
        most_open: responses, or episodes, in progress at once; None: as many as keep the engine busy.
        usage: this session's work is added to it.
        on_sample: receives each sample as soon as it is finished.
        runner: plays episodes instead of sampling single responses. It may raise errors of the environment.
        images: reads the images of the prompt with an index; None: prompts have none.
    """

    source: PromptSource
    n: int
    params: SamplingParams
    client: EngineClient
    _: KW_ONLY
    max_running_requests: int
    most_open: int | None = None
    usage: EngineUsage
    on_sample: Callable[[Sample], object]
    runner: EpisodeRunner | None = None
    images: Callable[[int], Awaitable[SentImages]] | None = None

    def __post_init__(self) -> None:
        limit = self.max_running_requests * (1 if self.runner is None else EPISODES_PER_SLOT)
        most_open = limit if self.most_open is None else min(limit, self.most_open)
        self._num_free = max(self.n, most_open)  # further responses that may begin
        self._has_room = asyncio.Event()
        self._slots = asyncio.Semaphore(self.max_running_requests)  # turns of episodes that the engine decodes at once
        self._num_running = 0
        self._since = time.perf_counter()
        self._episodes: dict[asyncio.Task[None], int] = {}  # prompt_index of each one in progress

    def run(self, is_interrupted: Callable[[], bool] = lambda: False) -> EngineFault | None:
        """Do what `run_async` does, in an event loop of its own."""
        with heartbeat.waiting():
            return asyncio.run(self.run_async(is_interrupted))

    async def run_async(self, is_interrupted: Callable[[], bool] = lambda: False) -> EngineFault | None:
        """Sample until all prompts are taken and this engine's are answered; return its fault if it fails.

        Args:
            is_interrupted: polled; True ends the session at once, whatever the engine is doing.
        Raises:
            EngineError: the engine refused a request, or exceeded the time limit of one.
        """
        try:
            await self._run(is_interrupted)
        except ExceptionGroup as group:
            error = first_error(group)
            if not isinstance(error, EngineFault):
                raise error from None
            return error
        finally:
            self._add_running(-self._num_running)
        return None

    async def _run(self, is_interrupted: Callable[[], bool]) -> None:
        async with self.client.open_async() as self._connections, asyncio.TaskGroup() as tasks:
            requests = tasks.create_task(self._request_all())
            health = tasks.create_task(self.client.watch(self._connections))
            while not requests.done():
                if is_interrupted():
                    requests.cancel()
                await asyncio.wait([requests], timeout=INTERRUPT_POLL_SECONDS)
            health.cancel()

    async def abort(self) -> None:
        """Abort what the engine is decoding for this session, and put it back; turns of episodes continue later. The
        source must be held meanwhile."""
        await self.client.abort_all(self._connections, lambda: self.is_idle)

    def cancel_episodes(self, prompt_indices: Collection[int]) -> None:
        """End the episodes of these prompts; their environments are closed."""
        for task, prompt_index in self._episodes.items():
            if prompt_index in prompt_indices:
                task.cancel()

    async def _request_all(self) -> None:
        """Request as many responses as there is room for until all are taken; then wait for them."""
        async with asyncio.TaskGroup() as tasks:
            while requests := await self.source.take(self._num_free):
                self._num_free -= len(requests)
                if self.runner is not None:
                    for request in requests:
                        episode = tasks.create_task(self._play(self.runner, request))
                        self._episodes[episode] = request.prompt_index
                        episode.add_done_callback(self._episodes.pop)
                else:
                    parts = [[one for one in requests if one.written is None]]
                    if self.images is not None:  # a request holds the files of one prompt
                        parts = [list(part) for _, part in groupby(parts[0], attrgetter("prompt_index"))]
                    for part in [*parts, *([one] for one in requests if one.written is not None)]:
                        tasks.create_task(self._answer(part))
                while self._num_free < self.n:
                    self._has_room.clear()
                    await self._has_room.wait()
                await asyncio.sleep(GATHERING_SECONDS)

    async def _answer(self, requests: Sequence[Request]) -> None:
        """Sample these responses by one request to the engine. A response that is begun comes alone."""
        if not requests:
            return
        params = self.params
        contexts = [request.prompt for request in requests]
        if (written := requests[0].written) is not None:
            params = replace(params, max_response_length=params.max_response_length - len(written.tokens))
            contexts = [requests[0].prompt + written.tokens]
        self._add_running(len(requests))
        images = [] if self.images is None else [await self.images(requests[0].prompt_index)] * len(requests)
        answers = self.client.generate_async(self._connections, contexts, params, images)
        async with contextlib.aclosing(answers) as responses:
            async for position, response in responses:
                request = requests[position]
                if self._is_complete(response, contexts[position]):
                    index, order, prompt, whole = request.with_written(response)
                    self.on_sample(response_sample(index, order, prompt, whole))
                else:
                    # The last token may be the end of the response, which an abort hides, so it is sampled again.
                    self.source.put_back(request.with_written(response.without_last_token()))
                self._add_running(-1)
                self._free_one()

    async def _play(self, runner: EpisodeRunner, request: Request) -> None:
        """Play an episode."""
        try:
            self.on_sample(await runner.play(request.prompt_index, request.sample_index, self._generate_turn))
        finally:
            self._free_one()

    async def _generate_turn(self, context: list[int], max_tokens: int) -> Generation:
        """Return a turn, in as many requests as aborts make of it."""
        written = None
        while True:
            so_far = [] if written is None else written.tokens
            async with self._slots:
                while self.source.is_held:
                    await asyncio.sleep(HOLD_POLL_SECONDS)
                response = await self._generate(context + so_far, max_tokens - len(so_far))
            is_complete = self._is_complete(response, context)
            response = response if is_complete else response.without_last_token()
            written = response if written is None else written + response
            if is_complete:
                return written

    async def _generate(self, context: list[int], max_tokens: int) -> Generation:
        params = replace(self.params, max_response_length=max_tokens)
        self._add_running(1)
        try:
            answers = self.client.generate_async(self._connections, [context], params)
            async with contextlib.aclosing(answers) as responses:
                [(_, response)] = [one async for one in responses]
        finally:
            self._add_running(-1)
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
        self._num_running = self._num_running + count
        self._since = now
