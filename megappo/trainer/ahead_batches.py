"""Steps whose responses were sampled while the models trained on those of earlier steps."""

import sys
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from megappo.config.loading import changes_since
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.data.record_dataset import share
from megappo.observe.files import CONFIG_FILE
from megappo.rollouts.ahead import POLL_SECONDS, AheadSampler, SharedCounts, has_enough
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.group_selection import StepResponses
from megappo.rollouts.journal import Choice, FinishedGroup, Journal
from megappo.rollouts.record import Record, rollout_settings
from megappo.rollouts.rollouts import Rollouts, raise_if_interrupted
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.listening import run_store
from megappo.trainer.batches import SampledBatches
from megappo.trainer.inference import InferenceEngines
from megappo.trainer.models import Phases
from megappo.trainer.progress import Progress


class GroupFacts(NamedTuple):
    """Facts about a finished group that all ranks have. A step trains on groups in this order.

    Attributes:
        is_equal: algorithm.filter_groups leaves it out, unless there are too few others.
        version, position: as in `FinishedGroup`.
    """

    is_equal: bool
    version: int
    position: int


def group_facts(group: FinishedGroup) -> GroupFacts:
    """Return the facts about a group."""
    return GroupFacts(group.is_equal, group.version, group.position)


class AheadBatches(SampledBatches):
    """Rows of groups that the engines have finished, while they sample further ones. All ranks call it together.

    As many prompts may be drawn and not trained on as 1 + rollout.max_staleness steps take. A step trains on the groups
    of the oldest weights first, in the order in which they were begun, as the first finished ones are the shortest. It
    waits until those that it leaves can be trained on before they are too old: see `has_enough`.

    Args:
        engines: their weights are synced after each step.
        progress: of the checkpoint that the run resumes from.
        cleanup: ends the sampling however the run ends.
    Attributes:
        prompts: admitted, and not trained on or left out yet, by position.

    Source: the limit is AReaL's (Fu et al. 2025, arXiv 2505.24298, eq. 3). There, a response may be too old when it is
    finished; here none is, and none is dropped.
    """

    def __init__(
        self,
        datasets: Datasets,
        rollouts: Rollouts,
        engines: InferenceEngines,
        record: Record | None,
        progress: Progress,
        cleanup: ExitStack,
    ):
        super().__init__(datasets, rollouts, lambda: None, record, num_drawn=progress.num_drawn)
        self.prompts: dict[int, Prompt] = {}
        self._exchange, self._engines, self._progress, self._cleanup = rollouts.exchange, engines, progress, cleanup
        self._size, self._max_staleness = self._config.data.train_batch_size, self._config.rollout.max_staleness
        self._journal = Journal(
            Path(self._config.trainer.output_dir),
            rollouts.restarts.engine_handle.number,
            rollouts.num_engines,
            rollout_settings(self._config) | {"rollout.max_staleness": self._max_staleness},
        )
        self._keeps_journal = not progress.is_new or self._exchange.on_rank_0(partial(_is_repeated, progress.config))
        self._sampler: AheadSampler | None = None
        self._is_restored = self._is_begun = False
        self._choices: dict[int, Choice] = {}  # of an earlier process
        self._facts: list[GroupFacts] = []  # finished groups of all ranks
        self._drawn: list[tuple[int, Prompt]] = []  # not admitted yet, by position
        self._num_versions = 0  # 1 + the newest version of an earlier process's groups
        self._removed = Counter[int]()  # groups, by version
        self._num_waiting = self._num_wakes = self._num_draws = self._num_equal = 0
        self._since = time.perf_counter()

    @property
    def pending(self) -> list[int]:
        """Positions of the prompts that no step has trained on or left out yet."""
        return sorted([*self.prompts, *dict(self._drawn)])

    def sample(self, step: int, phase: Phases) -> StepResponses:
        """Return this rank's responses of the groups that a step trains on, as soon as there are enough."""
        started = time.perf_counter()
        with phase("rollout"):
            if not self._is_restored:
                self._restore(step)
            choice = self._choices.get(step) or self._wait_for_choice(step)
        return self._take(step, choice, time.perf_counter() - started)

    def prepare_save(self) -> None:
        """Save what the engines have written of unfinished responses, with rollout.keep_partial."""
        if self._config.rollout.keep_partial and self._sampler is not None:
            self._sampler.save_partial()

    def forget_saved(self, step: int) -> None:
        """Delete what no run needs that resumes from a checkpoint after this step."""
        self._journal.forget(step - self._max_staleness)
        if self._exchange.rank == 0:
            self._journal.forget_choices(step)

    def _restore(self, step: int) -> None:
        """Read the groups that an earlier process has left, and draw their prompts."""
        exchange, journal = self._exchange, self._journal
        pending = list(self._progress.pending)
        if not self._keeps_journal:
            journal.forget(sys.maxsize)
            exchange.on_rank_0(lambda: journal.forget_choices(self._config.trainer.total_steps))
        finished, begun = journal.read()
        waiting = set(pending)
        done = [position for position in finished | begun if position < self.num_drawn and position not in waiting]
        for position in done:  # an earlier step has trained on them
            finished.pop(position, None)
            begun.pop(position, None)
        mine = [group_facts(group) for group in finished.values()]
        versions = {position: group.version for position, group in (finished | begun).items()}
        self._facts = sorted(chain.from_iterable(exchange.all_gather(mine)))
        versions = exchange.merge(versions)
        self._num_versions = 1 + max(versions.values(), default=-1)
        known = {facts.position for facts in self._facts}
        choices = exchange.on_rank_0(journal.read_choices)
        while (choice := choices.get(step)) and known.issuperset(choice.chosen + choice.left_out):
            self._choices[step] = choice
            step += 1
        drawn = self._prompts.drawn(share(pending, exchange.rank, exchange.world_size))
        self._drawn += zip(pending, chain.from_iterable(exchange.all_gather(drawn)), strict=True)
        while self.num_drawn <= max(versions, default=-1):
            self._draw_more()
        self.prompts |= {position: prompt for position, prompt in self._drawn if position in versions}
        self._drawn = [drawn for drawn in self._drawn if drawn[0] not in versions]
        self._shared = SharedCounts(run_store())
        if self._rollouts.client is not None:
            shared = SharedCounts(run_store().clone())
            self._sampler = AheadSampler(self._rollouts.for_thread(), shared, journal)
            self._sampler.restore(finished, begun, self.prompts)
        self._is_restored = True

    def _draw_more(self) -> None:
        first = self.num_drawn
        self._drawn += enumerate(self._draw(), first)

    def _begin(self) -> None:
        """Begin to sample. Steps that an earlier process has done need no further responses: what they began now would
        be older, once it is trained on, than it may be."""
        self._wake = self._rollouts.new_counter()
        if self._sampler is not None:
            sampler, restarts = self._sampler, self._rollouts.restarts
            restarts.on_restart, self._rollouts.hold = sampler.resume, sampler.held
            if self._config.rollout.on_sync == "finish":
                self._engines.hold = partial(sampler.held, until_idle=True)
            sampler.start()
            self._cleanup.callback(sampler.close)
        self._is_begun = True

    def _wait_for_choice(self, step: int) -> Choice:
        """Return the groups that the step trains on, as soon as there are enough."""
        if self._sampler is not None:
            self._sampler.version = step - 1
        if not self._is_begun:
            self._begin()
        self._num_draws = 0
        while True:
            self._admit(step)
            self._wait(step)
            raise_if_interrupted(self._exchange)
            self._num_wakes = self._wake(0)  # here no rank adds to it
            fault = None if self._sampler is None else self._sampler.fault
            if not self._rollouts.restarts.restart_after_rollout(fault) and (choice := self._choose(step)):
                return choice

    def _admit(self, step: int) -> None:
        """Admit as many prompts as may be begun; fewer while the models are slower than the engines, as they would only
        become older. With two steps ahead slow responses still delay none: see docs/async.md."""
        lookahead = self._max_staleness if self._num_waiting < self._size else min(2, self._max_staleness)
        num_steps = min(1 + lookahead, self._config.trainer.total_steps - step + 1)
        most = max(self._size - 1, (num_steps - 1) * self._size)
        num_equal = sum(facts.is_equal for facts in self._facts)
        while len(self.prompts) - num_equal <= most:
            if not self._drawn:
                if self._takes_equal:
                    return  # equal groups fill up the step
                self._draw_more()
                self._num_draws += 1
            prompts, self._drawn = dict(self._drawn[: self._size]), self._drawn[self._size :]
            self.prompts |= prompts
            if self._sampler is not None:
                self._sampler.admit(prompts)

    def _wait(self, step: int) -> None:
        """Wait, on ranks with an engine, until a step has enough groups, or all ranks have something to act on."""
        sampler = self._sampler
        if sampler is None:
            return
        with heartbeat.waiting():
            while not self._rollouts.is_interrupted() and self._wake(0) == self._num_wakes:
                if sampler.error is not None:
                    raise sampler.error
                if sampler.fault is not None or sampler.num_equal() > self._num_equal:
                    self._wake(1)
                    return
                finished, unfinished = self._counts(step)
                heartbeat.count(min(finished.total(), self._size), self._size, "prompts")
                if self._has_enough(step, finished, unfinished):
                    return
                time.sleep(POLL_SECONDS)

    def _counts(self, step: int) -> tuple[Counter[int], Counter[int]]:
        """Return how many groups of all ranks that a step can train on are finished, and begun only, by version."""
        oldest = max(0, step - 1 - self._max_staleness)  # of the groups that a step may train on
        versions = range(oldest, max(step, self._num_versions))
        finished = self._shared.total("finished", versions)
        unfinished = self._shared.total("begun", versions)
        unfinished.subtract(finished)
        finished.subtract({version: self._removed[version] for version in versions})
        if not self._takes_equal:
            finished.subtract(facts.version for facts in self._facts if facts.is_equal)
        return finished, unfinished

    def _has_enough(self, step: int, finished: Counter[int], unfinished: Counter[int]) -> bool:
        return has_enough(finished, unfinished, step, self._size, self._max_staleness)

    @property
    def _takes_equal(self) -> bool:
        """True if groups that algorithm.filter_groups leaves out fill up the step."""
        filters = self._config.algorithm.filter_groups
        return filters.enable and self._num_draws >= filters.max_num_gen_batches

    def _choose(self, step: int) -> Choice | None:
        """Return the groups that the step trains on; None if there are not enough."""
        mine: list[GroupFacts] = []
        unfinished = Counter[int]()
        if self._sampler is not None:
            self._num_equal = self._sampler.num_equal()
            unfinished = self._sampler.unfinished()  # first, so that no group is missed
            mine = [group_facts(group) for group in list(self._sampler.groups.values())]
        facts, counts = zip(*self._exchange.all_gather((mine, unfinished)), strict=True)
        self._facts = sorted(chain.from_iterable(facts))
        usable = [facts for facts in self._facts if self._takes_equal or not facts.is_equal]
        finished = Counter(facts.version for facts in usable)
        if not self._has_enough(step, finished, sum(counts, Counter())):
            return None
        chosen = sorted(facts.position for facts in usable[: self._size])
        equal = [facts.position for facts in self._facts if facts.is_equal]
        return Choice(chosen, sorted(set(equal).difference(chosen)), self._num_draws)

    def _take(self, step: int, choice: Choice, waited: float) -> StepResponses:
        """Return the chosen groups, by position; forget them, and those that are left out."""
        places = {position: place for place, position in enumerate(choice.chosen)}
        if self._exchange.rank == 0 and step not in self._choices:
            self._journal.write_choice(step, choice)
        removed = {*choice.chosen, *choice.left_out}
        self._removed.update(facts.version for facts in self._facts if facts.position in removed)
        num_kept = sum(facts.is_equal for facts in self._facts if facts.position in places)
        self._facts = [facts for facts in self._facts if facts.position not in removed]
        self._num_waiting, self._num_equal = len(self._facts), 0
        prompts = [self.prompts[position] for position in places]
        for position in removed:
            del self.prompts[position]
        responses = StepResponses(prompts, [], [], [])
        num_dropped, idle_frac = 0, None
        if self._sampler is not None:
            usage = self._sampler.take_usage()
            idle_frac = usage.idle_seconds / usage.seconds if usage.seconds else 1.0
            responses.usages = [usage]
            groups = self._sampler.forget(removed)
            responses.parts = [group for group in groups if group.position in places]
            num_dropped = sum(group.num_tokens for group in groups if group.position not in places)
        for group in responses.parts:
            for sample in group.samples:
                sample.prompt_index = places[group.position]
                responses.samples.append(sample)
        nums_dropped, idle_fracs = zip(*self._exchange.all_gather((num_dropped, idle_frac)), strict=True)
        responses.num_dropped_tokens = sum(nums_dropped)
        responses.metrics |= self._waits(waited, [frac for frac in idle_fracs if frac is not None])
        if self._config.algorithm.filter_groups.enable:
            responses.metrics |= {
                "filter_groups/num_gen_batches": choice.num_draws,
                "filter_groups/equal_groups": len(choice.left_out) + num_kept,
                "filter_groups/equal_groups_kept": num_kept,
            }
        return responses

    def _waits(self, waited: float, idle_fracs: list[float]) -> dict[str, float]:
        """Return the metrics of who waits, since the responses of the step before."""
        now = time.perf_counter()
        self._since, self._seconds = now, now - self._since
        return {
            "rollout/queue": self._num_waiting,
            "timing/engines_idle_frac": fmean(idle_fracs),
            "timing/trainers_idle_frac": waited / self._seconds,
        }

    def _sampling_seconds(self, phase: Phases) -> float:
        """Return the time since the responses of the step before: the engines have sampled all the while."""
        return self._seconds


def _is_repeated(config: Config) -> bool:
    """Return whether the earlier run of the output folder, if there was one, had the same config."""
    file = Path(config.trainer.output_dir, CONFIG_FILE)
    return file.exists() and not changes_since(file, config)
