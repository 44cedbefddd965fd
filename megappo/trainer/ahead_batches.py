"""Steps whose responses were sampled while the models trained on the responses of earlier steps."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from megappo.config.loading import changes_since
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.observe.files import CONFIG_FILE
from megappo.rollouts.ahead import POLL_SECONDS, AheadSampler
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.fingerprint import rollout_settings
from megappo.rollouts.group_queue import GroupQueue
from megappo.rollouts.group_selection import StepResponses
from megappo.rollouts.journal import Choice, Journal, unchanged
from megappo.rollouts.rank_groups import RankGroups, SharedCounts
from megappo.rollouts.record import Record
from megappo.rollouts.rollouts import Rollouts, raise_if_interrupted
from megappo.rollouts.sampler import EngineUsage
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.listening import run_store
from megappo.trainer.batches import SampledBatches
from megappo.trainer.inference import InferenceEngines
from megappo.trainer.models import Phases
from megappo.trainer.progress import Progress


class AheadBatches(SampledBatches):
    """Rows of groups that the engines have finished, while they sample further ones. All ranks call it together.

    Attributes:
        queue: groups of all ranks, which steps take.
        groups: this rank's.
        sampler: sampler of this rank's engine.
    """

    def __init__(
        self,
        datasets: Datasets,
        rollouts: Rollouts,
        record: Record | None,
        num_drawn: int,
        journal: Journal,
    ):
        super().__init__(datasets, rollouts, lambda: None, record, num_drawn=num_drawn)
        self._exchange = rollouts.exchange
        self._journal = journal
        self._shared = (
            None if rollouts.client is None else SharedCounts(run_store().clone(), self._config.data.train_batch_size)
        )
        self.queue, self.groups = GroupQueue(self._config), RankGroups(self._shared, journal)
        self.sampler = AheadSampler(rollouts, self._shared, self.queue, self.groups)
        self._choices: dict[int, Choice] = {}  # of an earlier process
        self._wake = rollouts.new_counter()
        self._num_wakes = 0
        self._num_equal = 0  # of `groups`, known to all ranks
        self._since, self._usage = time.perf_counter(), EngineUsage()  # at the responses of the step before

    @property
    def pending(self) -> list[int]:
        """Positions of the prompts that no step has trained on or left out yet."""
        return sorted([*self.queue.prompts, *self.queue.drawn])

    def restore(self, progress: Progress) -> None:
        """Take over the groups that an earlier process has left, and draw their prompts.

        Args:
            progress: progress of the checkpoint that the run resumes from.
        """
        journal = self._journal
        queue = self.queue
        pending = progress.pending
        last = progress.start_step
        if progress.is_new and not self._exchange.on_rank_0(partial(_is_repeated, progress.config)):
            last = sys.maxsize
            journal.forget(last)
        waiting = set(pending)
        # Earlier steps have trained on the others.
        read = [one for one in journal.read().values() if one.position in waiting or one.position >= self.num_drawn]
        groups = unchanged(read, self._prompts.drawn([one.position for one in read]))
        self.groups.restore(groups)
        begun = self._exchange.merge(dict.fromkeys(groups))
        newest = max(begun, default=-1)
        queue.drawn |= zip(pending, self._prompts.drawn(pending), strict=True)
        while self.num_drawn <= newest:
            queue.drawn |= self._draw_numbered()
        for position in begun:
            queue.prompts[position] = queue.drawn.pop(position)
        self._share_finished()
        known = {facts.position for facts in queue.finished}
        choices = self._exchange.on_rank_0(partial(journal.forget_choices, last))
        step = progress.start_step + 1 + (progress.experience is not None)
        while (choice := choices.get(step)) and known.issuperset(choice.chosen + choice.left_out):
            self._choices[step] = choice
            step += 1

    def sample(self, step: int, phase: Phases) -> StepResponses:
        """Return this rank's responses of the groups that a step trains on, as soon as there are enough."""
        started = time.perf_counter()
        with phase("rollout"):
            choice = self._choices.get(step) or self._wait_for_choice(step)
        return self._take(choice, time.perf_counter() - started)

    def prepare_save(self) -> None:
        """Save what the engines have written of unfinished responses, with rollout.keep_partial."""
        if self._config.rollout.keep_partial:
            self.sampler.save_partial()

    def forget_saved(self, step: int) -> None:
        """Delete what no run needs that resumes from a checkpoint after this step."""
        self._journal.forget(step - self._config.rollout.max_staleness)
        if self._exchange.rank == 0:
            self._journal.forget_choices(step)

    def _draw_numbered(self) -> Iterator[tuple[int, Prompt]]:
        """Return the next batch of prompts with their positions."""
        first = self.num_drawn
        return enumerate(self._draw(), first)

    def _wait_for_choice(self, step: int) -> Choice:
        """Return the groups that the step trains on, as soon as there are enough.

        A step whose groups an earlier process chose and finished does not call this, so the engines begin no prompt in
        it: the response would be older than rollout.max_staleness allows once a step trains on it.
        """
        self.sampler.begin_step(step - 1)
        self.queue.num_draws = 0
        while True:
            self.queue.admit(step, self._draw_numbered)
            is_enough = self._wait()
            raise_if_interrupted(self._exchange)
            self._num_wakes = self._wake(0)  # here no rank adds to it
            has_restarted = self._rollouts.restarts.restart_after_rollout(self.sampler.fault)
            if not has_restarted and self._share_finished(is_enough):
                return self.queue.choose(step)

    def _wait(self) -> bool:
        """Wait, on ranks with an engine, until a step has enough groups, or all ranks have something to act on; return
        whether there are enough."""
        sampler = self.sampler
        queue = self.queue
        size = self._config.data.train_batch_size
        waiting = queue.num_waiting()
        if self._shared is None:
            return False
        with heartbeat.waiting():
            while not self._rollouts.is_interrupted() and self._wake(0) == self._num_wakes:
                if sampler.error is not None:
                    raise sampler.error
                if sampler.fault is not None or self.groups.num_equal > self._num_equal:
                    self._wake(1)
                    break
                finished = self._shared.total("finished", waiting)
                equal = self._shared.total("equal", waiting)
                heartbeat.count(min(finished.total(), size), size, "prompts")
                if queue.has_enough(waiting, finished, equal):
                    return True
                time.sleep(POLL_SECONDS)
        return False

    def _share_finished(self, is_enough: bool = False) -> bool:
        """Exchange which groups are finished; return whether any rank has found that they are enough."""
        self._num_equal = self.groups.num_equal  # first, so that none is missed
        facts, enough = zip(*self._exchange.all_gather((self.groups.finished(), is_enough)), strict=True)
        self.queue.finished = sorted(chain.from_iterable(facts))
        return any(enough)

    def _take(self, choice: Choice, waited: float) -> StepResponses:
        """Return the chosen groups, in the order of their prompts; forget these groups, and the groups that are left
        out."""
        if self._exchange.rank == 0 and choice.step not in self._choices:
            self._journal.write_choice(choice)
        places = {position: place for place, position in enumerate(choice.chosen)}
        prompts = [self.queue.prompts[position] for position in places]
        num_kept = sum(facts.is_equal and facts.position in places for facts in self.queue.finished)

        self.queue.remove(choice)
        samples = []
        parts = []
        num_dropped = 0
        for group in self.groups.remove(sorted(choice.chosen + choice.left_out)):
            if group.position in places:
                for sample in group.samples:
                    sample.prompt_index = places[group.position]
                samples += group.samples
                parts.append(group)
            else:
                num_dropped += group.num_tokens

        earlier = self._usage
        self._usage = replace(self.sampler.usage)
        usage = self._usage.since(earlier)
        now = time.perf_counter()
        seconds = now - self._since
        self._since = now

        own = num_dropped, usage.busy_frac, waited / seconds
        nums_dropped, busy_fracs, waited_fracs = zip(*self._exchange.all_gather(own), strict=True)
        self.queue.adapt_lookahead(max(waited_fracs))
        metrics = {
            "rollout/queue": len(self.queue.finished),
            "timing/engines_idle_frac": 1 - sum(busy_fracs) / self._rollouts.num_engines,
            "timing/trainers_idle_frac": waited / seconds,
        }
        if self._config.algorithm.filter_groups.enable:
            metrics |= {
                "filter_groups/num_gen_batches": choice.num_draws,
                "filter_groups/equal_groups": len(choice.left_out) + num_kept,
                "filter_groups/equal_groups_kept": num_kept,
            }
        return StepResponses(prompts, samples, parts, [usage], sum(nums_dropped), metrics, seconds=seconds)


def make_ahead_batches(
    datasets: Datasets,
    rollouts: Rollouts,
    engines: InferenceEngines,
    record: Record | None,
    progress: Progress,
    cleanup: ExitStack,
) -> AheadBatches:
    """Return the batches of a run that samples ahead, with what an earlier process has left; all ranks together.

    Args:
        engines: their weights are synced after each step.
        progress: progress of the checkpoint that the run resumes from.
        cleanup: ends the sampling however the run ends.
    """
    config = rollouts.config
    restarts = rollouts.restarts
    settings = rollout_settings(config) | {"rollout.max_staleness": config.rollout.max_staleness}
    number = restarts.engine_handle.number
    journal = Journal(Path(config.trainer.output_dir), number, rollouts.num_engines, settings)
    batches = AheadBatches(datasets, rollouts, record, progress.num_drawn, journal)
    batches.restore(progress)
    sampler = batches.sampler
    restarts.on_restart = sampler.resume
    rollouts.hold = sampler.held
    if config.rollout.on_sync == "finish":
        engines.hold = partial(sampler.held, until_idle=True)
    cleanup.callback(sampler.close)
    return batches


def _is_repeated(config: Config) -> bool:
    """Return whether the earlier run of the output folder, if there was one, had the same config."""
    file = Path(config.trainer.output_dir, CONFIG_FILE)
    return file.exists() and not changes_since(file, config)
