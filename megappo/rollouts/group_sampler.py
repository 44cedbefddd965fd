"""Sampling for training: on each rank that owns an engine a thread samples and scores groups of responses.

Each engine takes the next admitted prompt when it has room. The main thread reads which groups are finished, and holds
the engine while it needs it alone. With rollout.max_staleness 0 the thread rests between the rollouts of two steps;
otherwise it samples without a break.
"""

import asyncio
from asyncio import TaskGroup
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any, TypeVar

from megappo.engines.generations import EngineFault
from megappo.rollouts.group_queue import GroupQueue
from megappo.rollouts.journal import Group
from megappo.rollouts.rank_groups import RankGroups, SharedCounts, differ
from megappo.rollouts.responses import Responses
from megappo.rollouts.rollouts import Rollouts
from megappo.rollouts.sampler import EngineUsage, Request, RolloutSession, first_error
from megappo.runtime.heartbeat import heartbeat

POLL_SECONDS = 0.05
Result = TypeVar("Result")


class EngineShare:
    """The admitted prompts that one of several engines takes.

    Args:
        admitted: positions of the prompts, the same for all engines.
    """

    def __init__(self, admitted: Sequence[int], num_engines: int, shared: SharedCounts):
        self._admitted = admitted
        self._num_engines = num_engines
        self._shared = shared
        self._places = range(0)  # in `admitted`, or after its end: taken by this engine

    @property
    def has_waiting(self) -> bool:
        """True while this engine may still take an admitted prompt."""
        own = self._places[:1]
        return any(place < len(self._admitted) for place in [*own, self._shared.take(0)])

    def take(self, most: int) -> list[int]:
        """Return the positions of the next prompts: an even share of the waiting prompts, so that no engine takes them
        all."""
        num_admitted = len(self._admitted)
        if not self._places:
            num_waiting = num_admitted - self._shared.take(0)
            if num_waiting <= 0:
                return []
            count = min(most, max(1, num_waiting // self._num_engines))
            first = self._shared.take(count)
            self._places = range(first, first + count)
        taken = [self._admitted[place] for place in self._places[:most] if place < num_admitted]
        self._places = self._places[len(taken) :]
        return taken


class GroupSampler:
    """Samples and scores the prompts that this rank's engine takes of those admitted. A `PromptSource`.

    It has a thread of its own, the sampling thread, which runs `take`, `put_back` and the private methods. The main
    thread calls the others. On a rank without an engine the thread is never started.

    Args:
        shared: None on ranks without an engine.
        queue: the queue whose admitted prompts are sampled.
        groups: this rank's.
    Attributes:
        version: steps that the engines' weights have been trained for. Written by the main thread.
        fault: fault of the engine, for the main thread to restart it. The sampling thread writes it and the next two.
        error: ended the sampling thread; the main thread raises it.
        usage: the engine's work so far.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        shared: SharedCounts | None,
        queue: GroupQueue,
        groups: RankGroups,
    ):
        self.version = 0
        self.fault: EngineFault | None = None
        self.error: BaseException | None = None
        self.usage = EngineUsage()
        self._rollouts = rollouts
        config = rollouts.config
        self._runs_ahead = config.rollout.runs_ahead
        num_admitted = (1 + config.rollout.max_staleness) * config.data.draw_size
        self._most_open = config.rollout.n * (num_admitted // rollouts.num_engines)
        self._filters = config.algorithm.filter_groups
        self._prompts = queue.prompts
        self._groups = groups
        self._share = EngineShare(queue.admitted, rollouts.num_engines, shared)
        self._again: list[Request] = []  # of groups that are begun
        self._session: RolloutSession | None = None
        self._scoring: Responses | None = None  # of all groups of a step that waits for its own
        self._num_holds = 0
        self._restarted = Event()
        self._is_closing = self._is_resting = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()  # replaced each time
        self._thread = Thread(target=self._run, name="sampling", daemon=True)

    def begin_step(self, version: int) -> None:
        """Sample with weights of this version from now on."""
        self.version = version
        self._is_resting = False
        if self._rollouts.client is not None and self._thread.ident is None:
            self._rollouts = self._rollouts.for_thread()
            self._loop = asyncio.new_event_loop()
            self._thread.start()

    def look(self) -> None:
        """Let the sampling thread see at once that prompts have been admitted."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end_pauses)

    def drop(self, positions: Collection[int]) -> list[Group]:
        """End the sampling of these prompts; remove and return this rank's groups."""
        if not self._thread.is_alive():
            return self._groups.remove(positions)
        with self.held():
            return self._in_thread(self._drop(positions))

    def rest(self) -> None:
        """Wait until the engine has no requests, and send it none until the next step."""
        if self._thread.is_alive():
            self._in_thread(self._rest())

    def save_partial(self) -> None:
        """Write what the engine has written of unfinished responses to the journal; the engine then continues them."""
        if self._thread.is_alive():
            with self.held():
                self._in_thread(self._abort())

    def close(self) -> None:
        """End the thread; what is in progress is lost."""
        self._is_closing = True
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def held(self, *, until_idle: bool = False) -> Iterator[None]:
        """Send the engine no further requests while the block runs.

        Args:
            until_idle: wait first until it has answered the requests that it has.
        """
        self._num_holds += 1
        try:
            if until_idle and self._thread.is_alive():
                self._in_thread(self._wait_idle())
            yield
        finally:
            self._num_holds -= 1

    def _in_thread(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Wait for a coroutine of the sampling thread; return its result."""
        with heartbeat.waiting():
            try:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
            except CancelledError:  # the thread has ended by an error
                self._thread.join()
                raise self.error or EngineFault("the sampling thread has ended") from None

    def resume(self) -> None:
        """Continue after a restart of the engine."""
        self._restarted.set()
        self.fault = None

    @property
    def is_held(self) -> bool:
        """True while the engine is to get no further request."""
        return self._num_holds > 0

    async def take(self, most: int) -> Sequence[Request]:
        """Return the next requests, as soon as there are any; none once the thread is to rest or to end."""
        while not (self._is_closing or self._is_resting):
            if not self.is_held and (requests := self._next(most)):
                return requests
            await self._pause()
        return []

    def put_back(self, request: Request) -> None:
        """Keep what an aborted request has written, and request the rest again."""
        self._groups.keep_written(request)
        self._again.append(request)

    def _next(self, most: int) -> list[Request]:
        """Return requests: for groups that are begun, or for further prompts."""
        if self._again:
            taken = self._again[:most]
            self._again = self._again[most:]
            return taken
        positions = self._share.take(most // self._rollouts.config.rollout.n)
        prompts = {position: self._prompts[position] for position in positions if position in self._prompts}
        return self._missing(self._groups.begin(prompts, self.version))

    def _missing(self, groups: Iterable[Group]) -> list[Request]:
        """Return requests for the responses of groups that are not finished."""
        requests: list[Request] = []
        for group in groups:
            position = group.position
            prompt = self._prompts[position].tokens
            finished = {sample.sample_index for sample in group.samples}
            missing = [order for order in range(self._rollouts.config.rollout.n) if order not in finished]
            requests += [Request(position, order, prompt, group.written.get(order)) for order in missing]
        return requests

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._sample())
        except BaseException as error:
            self.error = first_error(error)

    async def _sample(self) -> None:
        """Sample until the thread is to end; after a fault wait for the engine's restart."""
        async with TaskGroup() as tasks:
            watching = tasks.create_task(self._watch())
            for group in self._groups.unfinished():
                self._score_if_complete(group, tasks)
            while not self._is_closing:
                if not self._is_resting:
                    await self._sample_in_session(tasks)
                while (self._is_resting or self.fault is not None) and not self._is_closing:
                    await self._pause()
            watching.cancel()

    async def _sample_in_session(self, tasks: TaskGroup) -> None:
        """Sample until the thread is to rest or to end, or the engine fails."""
        self._restarted.clear()
        self._again = self._missing(self._groups.unfinished())  # of a failed engine, or of an earlier process
        self._session = self._new_session(tasks)
        try:
            fault = await self._session.run_async(lambda: self._is_closing)
        finally:
            self._session = None
            self._end_pauses()
        if not self._restarted.is_set():
            self.fault = fault

    def _new_session(self, tasks: TaskGroup) -> RolloutSession:
        rollouts = self._rollouts
        return RolloutSession(
            *(self, rollouts.config.rollout.n, rollouts.training, rollouts.client),
            max_running_requests=rollouts.config.rollout.max_running_requests,
            most_open=self._most_open,
            usage=self.usage,
            on_sample=lambda sample: self._score_if_complete(self._groups.add_sample(sample), tasks),
            runner=rollouts.episode_runner(self._prompts, rollouts.training),
            images=rollouts.sent_images(self._prompts),
        )

    async def _watch(self) -> None:
        """Count the engine's time, and end the scoring of a step's groups once all are written, until cancelled."""
        while True:
            if self._session is not None:
                self._session.count_time()
            if self._scoring is not None and not (self._share.has_waiting or self._unwritten()):
                self._end_scoring()
            await asyncio.sleep(POLL_SECONDS)

    def _unwritten(self) -> list[Group]:
        """Return the groups that lack responses."""
        return [group for group in self._groups.unfinished() if group.scoring is None]

    async def _wait_idle(self) -> None:
        await asyncio.sleep(POLL_SECONDS)  # a request may be about to be sent
        while self._session is not None and not self._session.is_idle:
            await asyncio.sleep(POLL_SECONDS)

    async def _rest(self) -> None:
        self._is_resting = True
        self._end_pauses()
        while self._session is not None:
            await self._pause()
        self._end_scoring()

    async def _pause(self) -> None:
        """Wait for POLL_SECONDS, or until there is something new."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), POLL_SECONDS)

    def _end_pauses(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _abort(self) -> None:
        if self._session is not None:
            with suppress(EngineFault):  # which ends the session, too
                await self._session.abort()

    async def _drop(self, positions: Collection[int]) -> list[Group]:
        if any(group.position in positions for group in self._unwritten()):
            await self._abort()
            if self._session is not None:
                self._session.cancel_episodes(positions)
        for position in positions:
            self._prompts.pop(position, None)
        self._again = [request for request in self._again if request.prompt_index not in positions]
        return self._groups.remove(positions)

    def _end_scoring(self) -> None:
        """Let functions that wait for all of a step's responses begin."""
        if self._scoring is not None:
            self._scoring.end()
        self._scoring = None

    def _score_if_complete(self, group: Group, tasks: TaskGroup) -> None:
        """Begin to score the responses to a prompt if all of them are finished."""
        if len(group.samples) == self._rollouts.config.rollout.n:
            tasks.create_task(self._score(group))

    async def _score(self, group: Group) -> None:
        """Score a group, and finish it once its scores have arrived, if steps are chosen by them or run ahead."""
        if group.position not in self._prompts:
            return  # it was dropped
        group.scoring = scoring = self._scoring or self._rollouts.new_responses(self._prompts)
        positions = scoring.add(group.samples)
        if self._runs_ahead:
            scoring.end()
        else:
            self._scoring = scoring
        if self._runs_ahead or self._filters.enable:
            while not scoring.fill_if_scored(positions):
                if self._is_closing:
                    return
                await asyncio.sleep(POLL_SECONDS)
        if self._runs_ahead:
            scoring.fill_grades()
            group.failures = scoring.failure_metrics()
        group.is_equal = self._filters.enable and not differ(group.samples, self._filters.metric)
        self._groups.finish(group)
