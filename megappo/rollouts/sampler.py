"""Spread prompts over engines: each engine takes the next prompts when it has room, so a fast engine takes more."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from megappo.engines.client import EngineClient, EngineFault, Generation, SamplingParams
from megappo.rollouts.episodes import Episode, EpisodeRunner

GATHERING_SECONDS = 0.005
"""Delay between a finished response and the request that takes its place: responses that the same batch of the engine
finishes are replaced by one request."""
INTERRUPT_POLL_SECONDS = 0.5
EARLY_STOP_POLL_SECONDS = 0.1
EPISODES_PER_SLOT = 4
"""Open episodes per sequence that an engine decodes at once: most of them may be waiting for their environments."""
IndexedPrompts = Sequence[tuple[int, list[int]]]
"""(prompt_index, token ids) of each prompt."""


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, with the fields of `Generation`.

    Attributes:
        log_probs: None at tokens that an environment wrote.
        episode: of a prompt with an environment; the tokens are those of its segments, in order.
    """

    prompt_index: int
    sample_index: int
    tokens: list[int]
    log_probs: Sequence[float | None]
    finish_reason: Literal["stop", "length"]
    episode: Episode | None = None

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return sum(log_prob is not None for log_prob in self.log_probs)


@dataclass
class EngineUsage:
    """Work of an engine in one or more sessions.

    Attributes:
        seconds: since the first request. sequence_seconds: the seconds of all sequences, added up.
        prompt_tokens: of finished sequences. cached_tokens: those of them that the engine had in its cache.
        written_tokens: of all sequences, also of aborted ones.
    """

    seconds: float = 0.0
    sequence_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0


def store_counter(store: dist.Store, key: str) -> Callable[[int], int]:
    """Return a counter that all ranks share: it adds `count` and returns the total before. `key` must be new."""
    return lambda count: store.add(key, count) - count


class RolloutSession:
    """This process's engine samples n responses to the prompts that it gets to.

    Every process that owns an engine opens a session at the same time, with the same prompts and a shared counter.
    Together they sample each response once, in no particular order.

    Args:
        take: a `store_counter` of the prompts that have been taken, shared by all engines.
        num_engines: engines of all processes. max_running_requests: sequences that each engine decodes at once.
        usage: this session's work is added to it.
        on_group: receives all samples of a prompt as soon as the last of them is finished.
        runner: plays episodes instead of sampling single responses. It may raise errors of the environment.
    """

    def __init__(
        self,
        prompts: IndexedPrompts,
        n: int,
        params: SamplingParams,
        client: EngineClient,
        take: Callable[[int], int],
        *,
        num_engines: int,
        max_running_requests: int,
        usage: EngineUsage,
        on_group: Callable[[Sequence[Sample]], object],
        runner: EpisodeRunner | None = None,
    ):
        self._prompts, self._n, self._params = prompts, n, params
        self._client, self._take = client, take
        self._usage, self._on_group, self._runner = usage, on_group, runner
        share = n * (len(prompts) // num_engines)
        limit = max_running_requests * (1 if runner is None else EPISODES_PER_SLOT)
        self._num_free = max(n, min(limit, share))  # further responses that may begin
        self._has_room = asyncio.Event()
        self._slots = asyncio.Semaphore(max_running_requests)  # turns of episodes that the engine decodes at once
        self._num_running, self._since = 0, time.perf_counter()
        self._stopping = False

    def run(
        self, is_interrupted: Callable[[], bool] = lambda: False, early_stop: Callable[[], bool] | None = None
    ) -> EngineFault | None:
        """Sample until all prompts are taken and this engine's are answered; return its fault if it fails.

        Args:
            is_interrupted: polled; True ends the session at once, whatever the engine is doing.
            early_stop: polled; True ends the session when the engine has aborted its requests and is idle.
        Raises:
            EngineError: the engine refused a request, or exceeded the time limit of one.
        """

        async def work() -> None:
            async with self._client.open_async() as http, asyncio.TaskGroup() as tasks:
                requests = tasks.create_task(self._request_all(http))
                tasks.create_task(self._watch(http, requests, is_interrupted, early_stop))
                health = tasks.create_task(self._client.watch(http))
                await asyncio.wait([requests])
                health.cancel()

        try:
            _run(work())
        except EngineFault as fault:
            return fault
        return None

    async def _request_all(self, http: Any) -> None:
        """Request as many prompts as there is room for until all prompts are taken; then wait for the responses."""
        respond = self._answer if self._runner is None else self._play
        async with asyncio.TaskGroup() as requests:
            while not self._stopping:
                count = self._num_free // self._n
                first = self._take(count)
                taken = self._prompts[first : first + count]
                if taken:
                    requests.create_task(respond(http, taken))
                    self._num_free -= self._n * len(taken)
                if len(taken) < count:
                    return
                while self._num_free < self._n:
                    self._has_room.clear()
                    await self._has_room.wait()
                await asyncio.sleep(GATHERING_SECONDS)

    async def _watch(
        self,
        http: Any,
        requests: asyncio.Task,
        is_interrupted: Callable[[], bool],
        early_stop: Callable[[], bool] | None,
    ) -> None:
        poll_seconds = INTERRUPT_POLL_SECONDS if early_stop is None else EARLY_STOP_POLL_SECONDS
        while not requests.done():
            if is_interrupted():
                requests.cancel()
            elif early_stop is not None and early_stop():
                self._stopping = True
                await self._client.abort_all(http, lambda: not self._num_running)
                requests.cancel()
            await asyncio.wait([requests], timeout=poll_seconds)

    async def _answer(self, http: Any, taken: IndexedPrompts) -> None:
        """Sample all responses to these prompts in one request."""
        n = self._n
        repeated = [tokens for _, tokens in taken for _ in range(n)]
        groups: list[dict[int, Generation]] = [{} for _ in taken]
        self._add_running(len(repeated))
        async with contextlib.aclosing(self._client.generate_async(http, repeated, self._params)) as responses:
            async for position, response in responses:
                if self._is_complete(response, repeated[position]):
                    number = position // n
                    groups[number][position % n] = response
                    if len(groups[number]) == n:
                        self._on_group(_group(taken[number][0], groups[number]))
                self._add_running(-1)
                self._free_one()

    async def _play(self, http: Any, taken: IndexedPrompts) -> None:
        """Play n episodes from each of these prompts, all at once."""
        async with asyncio.TaskGroup() as prompts:
            for index, _ in taken:
                prompts.create_task(self._play_group(http, index))

    async def _play_group(self, http: Any, index: int) -> None:
        async with asyncio.TaskGroup() as episodes:
            tasks = [episodes.create_task(self._play_one(http, index)) for _ in range(self._n)]
        self._on_group([_sample_of(index, order, task.result()) for order, task in enumerate(tasks)])

    async def _play_one(self, http: Any, index: int) -> Episode:
        try:
            return await self._runner.play(index, partial(self._generate_turn, http))
        finally:
            self._free_one()

    async def _generate_turn(self, http: Any, context: list[int], max_tokens: int) -> Generation:
        params = replace(self._params, max_response_length=max_tokens)
        async with self._slots:
            if self._stopping:
                await _wait_for_cancellation()
            self._add_running(1)
            try:
                async with contextlib.aclosing(self._client.generate_async(http, [context], params)) as responses:
                    [(_, response)] = [one async for one in responses]
            finally:
                self._add_running(-1)
        if not self._is_complete(response, context):
            await _wait_for_cancellation()
        return response

    def _is_complete(self, response: Generation, prompt: list[int]) -> bool:
        """Count a response's tokens; return whether it has ended by itself, not by an abort."""
        self._usage.written_tokens += len(response.tokens)
        if response.finish_reason == "abort":
            return False
        self._usage.prompt_tokens += len(prompt)
        self._usage.cached_tokens += response.num_cached
        return True

    def _free_one(self) -> None:
        self._num_free += 1
        self._has_room.set()

    def _add_running(self, count: int) -> None:
        """Change the number of sequences that the engine decodes, and account for the time since the last change."""
        now = time.perf_counter()
        self._usage.seconds += now - self._since
        self._usage.sequence_seconds += self._num_running * (now - self._since)
        self._num_running, self._since = self._num_running + count, now


async def _wait_for_cancellation() -> None:
    """Wait forever: the session is about to cancel this episode."""
    await asyncio.get_running_loop().create_future()


def _group(prompt_index: int, responses: Mapping[int, Generation]) -> list[Sample]:
    return [Sample(prompt_index, order, g.tokens, g.log_probs, g.finish_reason) for order, g in responses.items()]


def _sample_of(prompt_index: int, order: int, episode: Episode) -> Sample:
    tokens = [token for segment in episode.segments for token in segment.tokens]
    log_probs = [log_prob for segment in episode.segments for log_prob in segment.log_probs]
    return Sample(prompt_index, order, tokens, log_probs, "stop" if episode.ending == "done" else "length", episode)


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine; of several errors at once, raise the first one by itself."""
    try:
        asyncio.run(work)
    except* Exception as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
