"""Spreads prompts over engines: each takes the next prompts when it has room, so that a fast engine takes more."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch.distributed as dist

from megappo.engines.client import EngineClient, EngineFault, Generation, SamplingParams
from megappo.rollouts.episodes import Episode, Generate

GATHERING_SECONDS = 0.005
"""Between a response that leaves room and the request that takes it: others end in the same batch of the engine."""
STOP_SECONDS = 0.5
"""How often to ask whether to stop, and to tell of progress."""
ENOUGH_SECONDS = 0.1
"""How often to ask, besides, whether there is enough."""
EPISODES_PER_PLACE = 4
"""Episodes begun for each sequence that an engine decodes at once: most of them may be with their environments."""
Prompts = Sequence[tuple[int, list[int]]]
"""(prompt_index, token ids) each."""


class Play(Protocol):
    """Plays episodes, inside `open`, each from the prompt of a prompt_index on."""

    def open(self) -> AbstractAsyncContextManager[None]: ...

    def __call__(self, prompt_index: int, generate: Generate) -> Awaitable[Episode]: ...


@dataclass(frozen=True)
class Sample:
    """One response to one prompt, as `Generation`; log_probs are None at tokens that an environment wrote.

    Attributes:
        episode: with an environment; its segments have the tokens, one after the other.
    """

    prompt_index: int
    sample_index: int
    tokens: list[int]
    log_probs: Sequence[float | None]
    finish_reason: Literal["stop", "length"]
    episode: Episode | None = None

    @property
    def num_policy_tokens(self) -> int:
        """How many of the tokens the policy wrote."""
        return sum(log_prob is not None for log_prob in self.log_probs)


@dataclass
class Use:
    """How busy an engine was.

    Attributes:
        seconds: since it was asked first; sequence_seconds: the same for each sequence that it had, of all together.
        prompt_tokens: of the sequences that it finished; cached_tokens: how many of them needed no computing.
        written_tokens: of all sequences, in vain or not.
    """

    seconds: float = 0.0
    sequence_seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0

    def __add__(self, other: "Use") -> "Use":
        return Use(*(mine + further for mine, further in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Sampled:
    """What an engine wrote.

    Attributes:
        samples: all n of each prompt that is among them.
        use: of the engine meanwhile.
        fault: why there are no more, where the engine has failed.
    """

    samples: list[Sample]
    use: Use
    fault: EngineFault | None = None


def store_counter(store: dist.Store, key: str) -> Callable[[int], int]:
    """Hands out positions 0, 1, 2, ... each once, to whichever rank asks: the first of the next `count`, which is how
    many were taken before, by anybody. `key` must be new in the store."""
    return lambda count: store.add(key, count) - count


def sample(
    prompts: Prompts,
    n: int,
    params: SamplingParams,
    client: EngineClient,
    take: Callable[[int], int],
    *,
    num_engines: int,
    max_running_requests: int,
    on_prompts: Callable[[int], None] = lambda count: None,
    on_group: Callable[[Sequence[Sample]], None] = lambda samples: None,
    stop: Callable[[], bool] = lambda: False,
    enough: Callable[[], bool] | None = None,
    play: Play | None = None,
) -> Sampled:
    """Sample n responses for those of the prompts that this process' engine gets to, in no particular order.

    Every process with an engine calls this at once, with the same prompts; together they return each sample once.

    Args:
        client: of this process. take: a `store_counter` shared by all.
        num_engines: of all processes together. max_running_requests: sequences that each decodes at once.
        on_prompts: told now and then of how many more prompts this engine has finished all n samples.
        on_group: gets all samples of a prompt, as soon as they are there; in the order in which they are returned.
        stop: asked now and then; once it says so, the rest is left, and what is there returned.
        enough: the same of a rest that is not wanted: asked more often, and the engine is idle when this returns.
        play: has episodes in place of single responses; may raise what is wrong with its environment.
    Raises:
        EngineError: the engine refused a request, or took too long for it.
    """
    share = n * (len(prompts) // num_engines)
    room = max(n, min(max_running_requests * (EPISODES_PER_PLACE if play else 1), share))
    asking = _Asking(prompts, n, params, client, take, room, asyncio.Semaphore(max_running_requests), on_group, play)
    tell = asking.teller(on_prompts)

    async def watch(answers: asyncio.Task, http: Any) -> None:
        try:
            while not answers.done():
                if stop():
                    answers.cancel()
                elif enough is not None:
                    await asking.end_if(enough, answers, http)
                await asyncio.wait([answers], timeout=STOP_SECONDS if enough is None else ENOUGH_SECONDS)
                tell()
        finally:
            tell()

    async def work() -> None:
        async with asking.playing, client.open_async() as http, asyncio.TaskGroup() as tasks:
            answers = tasks.create_task(asking.all_answers(http))
            tasks.create_task(watch(answers, http))
            health = tasks.create_task(client.watch(http))
            await asyncio.wait([answers])
            health.cancel()

    try:
        _run(work())
    except EngineFault as fault:
        return Sampled(asking.samples, asking.use, fault)
    return Sampled(asking.samples, asking.use)


class _Asking:
    """One engine's part of the prompts.

    Args:
        room: responses that are to be begun at once.
        places: of episodes, those whose turn the engine is to write at once.
    Attributes:
        samples: so far; all n of each prompt that is among them. use: of the engine, until the last change.
        playing: inside, episodes can be played.
    """

    def __init__(
        self,
        prompts: Prompts,
        n: int,
        params: SamplingParams,
        client: EngineClient,
        take: Callable[[int], int],
        room: int,
        places: asyncio.Semaphore,
        on_group: Callable[[Sequence[Sample]], None],
        play: Play | None,
    ):
        self.samples: list[Sample] = []
        self.use = Use()
        self._num_running, self._since = 0, time.perf_counter()
        self._prompts, self._n, self._params = prompts, n, params
        self._client, self._take, self._play = client, take, play
        self.playing = contextlib.nullcontext() if play is None else play.open()
        self._respond = self._answers if play is None else self._episodes
        self._room, self._num_open, self._has_room, self._places = room, 0, asyncio.Event(), places
        self._on_group = on_group
        self._has_enough = False

    async def all_answers(self, http: Any) -> None:
        """Request, again and again, as many prompts as there is room for; until all are taken, and these answered."""
        async with asyncio.TaskGroup() as requests:
            while not self._has_enough:
                count = (self._room - self._num_open) // self._n
                first = self._take(count)
                if taken := self._prompts[first : first + count]:
                    requests.create_task(self._respond(http, taken))
                self._num_open += self._n * len(taken)
                if len(taken) < count:
                    return
                while self._room - self._num_open < self._n:
                    self._has_room.clear()
                    await self._has_room.wait()
                await asyncio.sleep(GATHERING_SECONDS)

    async def end_if(self, enough: Callable[[], bool], answers: asyncio.Task, http: Any) -> None:
        """Where there is enough, ask for nothing more, have the engine leave what it is at, and end `all_answers`."""
        if enough():
            self._has_enough = True
            await self._client.abort_all(http, lambda: not self._num_running)
            answers.cancel()

    def teller(self, on_prompts: Callable[[int], None]) -> Callable[[], None]:
        """Tells how many more prompts are finished than when it was called before."""
        num_told = 0

        def tell() -> None:
            nonlocal num_told
            if num_new := len(self.samples) // self._n - num_told:
                on_prompts(num_new)
                num_told += num_new

        return tell

    async def _answers(self, http: Any, taken: Prompts) -> None:
        """Have the engine answer one request."""
        n = self._n
        repeated = [tokens for _, tokens in taken for _ in range(n)]
        groups: list[dict[int, Generation]] = [{} for _ in taken]
        self._add_running(len(repeated))
        async with contextlib.aclosing(self._client.generate_async(http, repeated, self._params)) as responses:
            async for position, response in responses:
                if self._is_whole(response, repeated[position]):
                    group = groups[position // n]
                    group[position % n] = response
                    if len(group) == n:
                        self.samples += (finished := _group(taken[position // n][0], group))
                        self._on_group(finished)
                self._add_running(-1)
                self._response_ended()

    async def _episodes(self, http: Any, taken: Prompts) -> None:
        """Play those of one request, all at once."""
        async with asyncio.TaskGroup() as prompts:
            for index, _ in taken:
                prompts.create_task(self._episodes_of(http, index))

    async def _episodes_of(self, http: Any, index: int) -> None:
        async with asyncio.TaskGroup() as episodes:
            playing = [episodes.create_task(self._episode(http, index)) for _ in range(self._n)]
        self.samples += (finished := [_of_episode(index, order, task.result()) for order, task in enumerate(playing)])
        self._on_group(finished)

    async def _episode(self, http: Any, index: int) -> Episode:
        try:
            return await self._play(index, partial(self._generated, http))
        finally:
            self._response_ended()

    async def _generated(self, http: Any, context: list[int], room: int) -> Generation:
        """A turn, as soon as the engine has a place for it."""
        params = replace(self._params, max_response_length=room)
        async with self._places:
            if self._has_enough:
                await _cancelled()
            self._add_running(1)
            try:
                async with contextlib.aclosing(self._client.generate_async(http, [context], params)) as responses:
                    [(_, response)] = [one async for one in responses]
            finally:
                self._add_running(-1)
        if not self._is_whole(response, context):
            await _cancelled()
        return response

    def _is_whole(self, response: Generation, prompt: list[int]) -> bool:
        """Note what an engine has written; whether it has come to its end."""
        self.use.written_tokens += len(response.tokens)
        if response.finish_reason == "abort":
            return False
        self.use.prompt_tokens += len(prompt)
        self.use.cached_tokens += response.num_cached
        return True

    def _response_ended(self) -> None:
        """Note that a response has: there is room for another."""
        self._num_open -= 1
        self._has_room.set()

    def _add_running(self, more: int) -> None:
        """Note that the engine has so many sequences more than before."""
        now = time.perf_counter()
        self.use.seconds += now - self._since
        self.use.sequence_seconds += self._num_running * (now - self._since)
        self._num_running, self._since = self._num_running + more, now


async def _cancelled() -> None:
    """Wait for it: of an episode nothing more is wanted."""
    await asyncio.get_running_loop().create_future()


def _group(prompt_index: int, responses: Mapping[int, Generation]) -> list[Sample]:
    return [Sample(prompt_index, order, g.tokens, g.log_probs, g.finish_reason) for order, g in responses.items()]


def _of_episode(prompt_index: int, order: int, episode: Episode) -> Sample:
    tokens = [token for segment in episode.segments for token in segment.tokens]
    log_probs = [log_prob for segment in episode.segments for log_prob in segment.log_probs]
    return Sample(prompt_index, order, tokens, log_probs, "stop" if episode.ending == "done" else "length", episode)


def _run(work: Any) -> None:
    """Run a coroutine; of several failures at once the first is raised as it is."""
    try:
        asyncio.run(work)
    except* Exception as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
