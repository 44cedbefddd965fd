"""Sampling ahead of training: on each rank that owns an engine a thread samples and scores without a break.

Prompts are numbered in the order in which they are drawn. All ranks admit them together, and each engine takes the next
one when it has room. The main thread reads what is finished, and holds the engine while it needs it alone.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Thread
from typing import Literal

from torch.distributed import Store

from megappo.data.prompts import Prompt
from megappo.engines.generations import EngineFault
from megappo.rollouts.group_selection import differ
from megappo.rollouts.journal import BegunGroup, FinishedGroup, Journal
from megappo.rollouts.responses import Responses
from megappo.rollouts.rollouts import Rollouts
from megappo.rollouts.sample_rows import Sample
from megappo.rollouts.sampler import EngineUsage, Request, RolloutSession, first_error
from megappo.runtime.heartbeat import heartbeat

POLL_SECONDS = 0.05


class SharedCounts:
    """Counts that the engines of all ranks share, in the run's store.

    Args:
        store: a connection that no other thread uses.
    """

    def __init__(self, store: Store):
        self._store = store

    def take(self, count: int) -> int:
        """Take the next so many admitted prompts; return how many were taken before."""
        return self._store.add("ahead/taken", count) - count

    def add(self, kind: Literal["begun", "finished"], version: int, count: int = 1) -> int:
        """Count groups of a version; return the total."""
        return self._store.add(f"ahead/{kind}/{version}", count)

    def total(self, kind: Literal["begun", "finished"], versions: Iterable[int]) -> Counter[int]:
        """Return how many groups of each version have been begun, finished ones included, or have been finished."""
        return Counter({version: self.add(kind, version, 0) for version in versions})


def has_enough(
    finished: Mapping[int, int], unfinished: Mapping[int, int], step: int, batch_size: int, max_staleness: int
) -> bool:
    """Return whether a step can train on `batch_size` finished groups, those of the oldest weights first, and leave
    later steps so few of each age that none becomes too old.

    Groups of version v can be trained on until step v + 1 + max_staleness. So after this step at most as many of
    version v or older may remain as the steps until then take.

    Args:
        finished, unfinished: number of groups by the version of the weights with which they were begun.
    """
    if sum(finished.values()) < batch_size:
        return False
    num_finished = num_unfinished = 0
    for version in sorted(finished.keys() | unfinished.keys()):
        num_finished += finished.get(version, 0)
        num_unfinished += unfinished.get(version, 0)
        num_left = num_unfinished + max(0, num_finished - batch_size)
        if num_left > batch_size * max(0, version + 1 + max_staleness - step):
            return False
    return True


class AheadSampler:
    """Samples and scores the prompts that this rank's engine takes of those admitted. A `PromptSource`.

    It has a thread of its own, the sampling thread, which runs `take`, `put_back` and the private methods. The main
    thread calls the others.

    Args:
        rollouts: a copy for the sampling thread.
        shared: over a connection of the sampling thread.
        journal: keeps what is sampled.
    Attributes:
        version: steps that the engines' weights have been trained for. Written by the main thread.
        fault: of the engine, for the main thread to restart it. Written by the sampling thread, as are the next three.
        error: ended the sampling thread; the main thread raises it.
        groups: finished groups by the position of their prompt, until the main thread takes them.
        usage: the engine's work so far.
    """

    def __init__(self, rollouts: Rollouts, shared: SharedCounts, journal: Journal):
        self.config, self.version = rollouts.config, 0
        self.fault: EngineFault | None = None
        self.error: BaseException | None = None
        self.groups: dict[int, FinishedGroup] = {}
        self.usage, self._taken_usage = EngineUsage(), EngineUsage()
        self._rollouts, self._shared, self._journal = rollouts, shared, journal
        self._prompts: dict[int, Prompt] = {}
        self._admitted: list[int] = []
        self._reserved: list[int] = []  # places in `_admitted`, or after its end, that this engine has taken
        self._again: list[Request] = []  # of groups that are begun
        self._begun: dict[int, BegunGroup] = {}  # by position, until the group is finished
        self._scoring: dict[int, Responses] = {}
        self._holds = self._restarts = 0
        self._is_closing = self._is_saving = False
        self._session: RolloutSession | None = None
        self._thread = Thread(target=self._serve, name="sampling-ahead", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; what is in progress is lost."""
        self._is_closing = True
        self._thread.join()

    def restore(
        self, finished: dict[int, FinishedGroup], begun: dict[int, BegunGroup], prompts: Mapping[int, Prompt]
    ) -> None:
        """Add groups of an earlier process and their prompts, by position."""
        self.groups |= finished
        self._prompts |= prompts
        self._begun |= begun
        for group in (finished | begun).values():
            self._shared.add("begun", group.version)
        for group in finished.values():
            self._shared.add("finished", group.version)

    def admit(self, prompts: Mapping[int, Prompt]) -> None:
        """Admit prompts, by their positions; every engine gets the same ones in the same order."""
        self._prompts |= prompts
        self._admitted += prompts

    def unfinished(self) -> Counter[int]:
        """Return how many of this rank's groups are begun and not finished, by version."""
        return Counter(group.version for group in list(self._begun.values()))

    def num_equal(self) -> int:
        """Return how many groups this rank has that algorithm.filter_groups leaves out."""
        return sum(group.is_equal for group in list(self.groups.values()))

    def take_usage(self) -> EngineUsage:
        """Return the engine's work since the last call."""
        earlier, self._taken_usage = self._taken_usage, replace(self.usage)
        return self._taken_usage.since(earlier)

    def forget(self, positions: Collection[int]) -> list[FinishedGroup]:
        """Remove the groups of these positions; return those of this rank."""
        for position in positions:
            self._prompts.pop(position, None)
        return [self.groups.pop(position) for position in sorted(self.groups.keys() & positions)]

    @contextmanager
    def held(self, *, until_idle: bool = False) -> Iterator[None]:
        """Send the engine no further requests inside.

        Args:
            until_idle: wait first until it has answered those that it has.
        """
        self._holds += 1
        try:
            with heartbeat.waiting():
                while until_idle:
                    time.sleep(POLL_SECONDS)  # the sampling thread may be about to send one
                    session = self._session
                    until_idle = session is not None and not session.is_idle
            yield
        finally:
            self._holds -= 1

    def resume(self) -> None:
        """Continue after a restart of the engine."""
        self._restarts += 1
        self.fault = None

    @property
    def is_held(self) -> bool:
        """True while the engine is to get no further request."""
        return self._holds > 0

    async def take(self, most: int) -> Sequence[Request]:
        """Return the next requests, as soon as there are any; none once the thread is to end."""
        while not self._is_closing:
            if not self.is_held and (requests := self._next(most)):
                return requests
            await asyncio.sleep(POLL_SECONDS)
        return []

    def put_back(self, request: Request) -> None:
        """Keep what an aborted request has written, and request the rest again."""
        position, order, _, written = request
        if written is not None:
            group = self._begun[position]
            group.written[order] = written
            self._journal.write_partial(position, group.version, order, written)
        self._again.append(request)

    def _next(self, most: int) -> list[Request]:
        """Return requests: for groups that are begun, or for an even share of the admitted prompts that wait, so that
        no engine takes them all."""
        if self._again:
            taken, self._again = self._again[:most], self._again[most:]
            return taken
        most_prompts, num_admitted = most // self.config.rollout.n, len(self._admitted)
        if not self._reserved:
            num_waiting = num_admitted - self._shared.take(0)
            if num_waiting <= 0:
                return []
            count = min(most_prompts, max(1, num_waiting // self._rollouts.num_engines))
            first = self._shared.take(count)
            self._reserved += range(first, first + count)
        places = [place for place in self._reserved if place < num_admitted][:most_prompts]
        self._reserved = self._reserved[len(places) :]
        requests: list[Request] = []
        version = self.version  # the main thread may change it meanwhile
        for position in [self._admitted[place] for place in places]:
            self._begun[position] = BegunGroup(version)
            requests += self._missing(position)
        self._shared.add("begun", version, len(places))
        return requests

    def _missing(self, position: int) -> list[Request]:
        """Return requests for the responses of a group that are not finished."""
        group, prompt = self._begun[position], self._prompts[position].tokens
        finished = {sample.sample_index for sample in group.samples}
        missing = [order for order in range(self.config.rollout.n) if order not in finished]
        return [Request(position, order, prompt, group.written.get(order)) for order in missing]

    def save_partial(self) -> None:
        """Write what the engine has written of unfinished responses to the journal; the engine then continues them."""
        with self.held(), heartbeat.waiting():
            self._is_saving = True
            while self._is_saving and self._session is not None:
                time.sleep(POLL_SECONDS)
            self._is_saving = False

    def _serve(self) -> None:
        try:
            asyncio.run(self._sample())
        except BaseException as error:
            self.error = first_error(error)

    async def _sample(self) -> None:
        """Sample until the thread is to end; after a fault wait for the engine's restart."""
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(self._collect())
            while not self._is_closing:
                restarts = self._restarts
                self._request_missing()
                self._session = self._new_session()
                try:
                    fault = await self._session.run_async(lambda: self._is_closing)
                finally:
                    self._session = None
                if restarts == self._restarts:  # else the engine has been restarted since
                    self.fault = fault
                while self.fault is not None and not self._is_closing:
                    await asyncio.sleep(POLL_SECONDS)
            collecting.cancel()

    def _request_missing(self) -> None:
        """Request what is missing of the groups that are begun, by a failed engine or an earlier process."""
        self._again = []
        for position in sorted(self._begun.keys() - self._scoring.keys()):
            self._again += self._missing(position)
            if len(self._begun[position].samples) == self.config.rollout.n:
                self._score(position)

    def _new_session(self) -> RolloutSession:
        rollouts = self._rollouts
        return RolloutSession(
            *(self, self.config.rollout.n, rollouts.training, rollouts.client),
            max_running_requests=self.config.rollout.max_running_requests,
            usage=self.usage,
            on_sample=self._add,
            runner=rollouts.episode_runner(self._prompts, rollouts.training),
        )

    def _add(self, sample: Sample) -> None:
        """Add a finished response, and begin to score those to its prompt if it is the last of them."""
        position = sample.prompt_index
        group = self._begun[position]
        self._journal.write_sample(position, group.version, sample)
        group.samples.append(sample)
        if len(group.samples) == self.config.rollout.n:
            self._score(position)

    def _score(self, position: int) -> None:
        """Begin to score all responses to a prompt."""
        samples = self._begun[position].samples
        for one in samples:
            one.prompt_index = 0
        responses = self._rollouts.new_responses([self._prompts[position]])
        responses.add(samples)
        responses.end()
        self._scoring[position] = responses

    async def _collect(self) -> None:
        """Move groups that have been scored to `groups`, and abort responses to save them, until cancelled."""
        while True:
            for position, responses in list(self._scoring.items()):
                if responses.fill_if_scored(range(len(responses.samples))):
                    self._finish(position, responses)
            if self._session is not None:
                self._session.count_time()
                if self._is_saving:
                    with suppress(EngineFault):  # which ends the session, too
                        await self._session.abort()
                    self._is_saving = False
            await asyncio.sleep(POLL_SECONDS)

    def _finish(self, position: int, responses: Responses) -> None:
        responses.fill_grades()
        filters = self.config.algorithm.filter_groups
        samples, version = responses.samples, self._begun[position].version
        is_equal = filters.enable and not differ(samples, filters.metric)
        group = FinishedGroup(position, version, is_equal, samples, responses.failure_metrics())
        self._journal.write_grades(group)
        self.groups[position] = group
        del self._scoring[position], self._begun[position]
        self._shared.add("finished", version)
