"""A step's scored rows, sampled by the engines; `rollouts.record.Replay` reads them from a file."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from megappo.batch.exchange import Batch
from megappo.batch.rows import Rows
from megappo.config.loading import changes_since
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.observe.files import CONFIG_FILE
from megappo.ppo.reward_shaping import RunningMoments, shape_scores
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.fingerprint import rollout_settings
from megappo.rollouts.group_queue import GroupQueue
from megappo.rollouts.group_sampler import POLL_SECONDS, GroupSampler
from megappo.rollouts.journal import Choice, Group, Journal, NoJournal, unchanged
from megappo.rollouts.rank_groups import RankGroups, SharedCounts
from megappo.rollouts.record import Record
from megappo.rollouts.responses import Responses, warn_of_lost
from megappo.rollouts.rollouts import Rollouts, raise_if_interrupted
from megappo.rollouts.row_builder import RowBuilder, score_counts, total_scores
from megappo.rollouts.sampler import GATHERING_SECONDS, EngineUsage
from megappo.rollouts.step_responses import Batches, StepResponses
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.listening import run_store
from megappo.trainer.inference import InferenceEngines, NoEngines
from megappo.trainer.models import Phases
from megappo.trainer.progress import Progress


class SampledBatches(Batches):
    """Rows of groups that the engines have sampled: before a step trains on them, or while earlier steps trained. All
    ranks call it together.

    Each step draws and admits prompts, which the engines sample and the reward function scores, and chooses the groups
    that it trains on.

    Args:
        sleep: called when the engines have sampled everything, if they do not run ahead.
        record: keeps the rows of each step.
        num_drawn: prompts that earlier steps have drawn.
    Attributes:
        queue: groups of all ranks, which steps take.
        groups: this rank's.
        sampler: sampler of this rank's engine.
    """

    def __init__(
        self,
        datasets: Datasets,
        rollouts: Rollouts,
        sleep: Callable[[], None],
        record: Record | None = None,
        *,
        num_drawn: int = 0,
        journal: Journal | NoJournal,
    ):
        self.num_drawn = num_drawn
        self._prompts = datasets.train
        self._rollouts = rollouts
        self._exchange = rollouts.exchange
        self._config = rollouts.config
        self._runs_ahead = rollouts.config.rollout.runs_ahead
        parts = rollouts.config, datasets.vocab_size, rollouts.tokenizer, rollouts.exchange
        self._row_builder = RowBuilder(*parts, has_images=rollouts.images is not None)
        self._sleep = sleep
        self._record = record
        self._journal = journal
        draw_size = rollouts.config.data.draw_size
        self._shared = None if rollouts.client is None else SharedCounts(run_store().clone(), draw_size)
        self.queue, self.groups = GroupQueue(self._config), RankGroups(self._shared, journal)
        self.sampler = GroupSampler(rollouts, self._shared, self.queue, self.groups)
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
        step = progress.sampled_step + 1
        while (choice := choices.get(step)) and known.issuperset(choice.chosen):
            self._choices[step] = choice
            step += 1

    def sample(self, step: int, phase: Phases) -> StepResponses:
        """Return this rank's responses of the groups that a step trains on, as soon as there are enough. Engines that
        do not run ahead sleep afterwards."""
        started = time.perf_counter()
        with phase("rollout"):
            choice = self._choices.get(step) or self._wait_for_choice(step)
            responses = self._take(choice, time.perf_counter() - started)
            if self._config.algorithm.method.needs_greedy_baseline:
                responses.greedy = self._rollouts.sample(responses.prompts, 1, self._rollouts.greedy)
            if not self._runs_ahead:
                self._sleep()
        if not self._runs_ahead:
            responses.seconds = phase.seconds("rollout")
        return responses

    def score(
        self,
        step: int,
        responses: StepResponses,
        phase: Phases,
    ) -> tuple[Batch, dict[str, Any]]:
        """Wait for the scores of a step's responses, unless `sample` has; return each row on the rank that owns it, and
        metrics."""
        with phase("reward"):
            batch, metrics = self._row_builder.build(responses, step if self._runs_ahead else None)
            if responses.greedy is not None:
                batch = replace(batch, rows=self._with_baselines(batch.rows, responses.greedy))
        num_tokens = metrics["rollout/num_tokens"] + responses.num_dropped_tokens
        metrics |= responses.metrics | {
            "rollout/num_tokens": num_tokens,
            "rollout/engine_restarts": self._rollouts.restarts.take_count(),
        }
        if self._record is not None:
            with phase("record"):
                self._record.write(step, batch, responses.prompts, num_tokens, self.num_drawn)
        return batch, metrics | {"rollout/tokens_per_second": num_tokens / responses.seconds}

    def prepare_save(self) -> None:
        """Save what the engines have written of unfinished responses, with rollout.keep_partial."""
        if self._config.rollout.keep_partial:
            self.sampler.save_partial()

    def forget_saved(self, step: int) -> None:
        """Delete what no run needs that resumes from a checkpoint after this step."""
        self._journal.forget(step - self._config.rollout.max_staleness)
        if self._exchange.rank == 0:
            self._journal.forget_choices(step)

    def _draw(self) -> list[Prompt]:
        """Return the prompts of the next draw, of which each rank tokenizes its share."""
        exchange = self._exchange
        mine = self._prompts.batch(self.num_drawn, exchange.rank, exchange.world_size)
        self.num_drawn += self._config.data.draw_size
        return list(chain.from_iterable(exchange.all_gather(mine)))

    def _draw_numbered(self) -> Iterator[tuple[int, Prompt]]:
        """Return the next draw with the positions of its prompts."""
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
            self.sampler.look()
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
                self.groups.has_finished.clear()
                finished = self._shared.total("finished", waiting)
                equal = self._shared.total("equal", waiting)
                self._count(finished)
                if queue.has_enough(waiting, finished, equal):
                    return True
                self.groups.has_finished.wait(POLL_SECONDS)
                time.sleep(GATHERING_SECONDS)  # for several that finish together
        return False

    def _count(self, finished: Counter[int]) -> None:
        """Show how many responses the step has. The other engines' tokens are taken to be as many as this one's."""
        size = self._config.data.train_batch_size
        n = self._config.rollout.n
        num_tokens = self.sampler.usage.written_tokens - self._usage.written_tokens
        heartbeat.count(n * min(finished.total(), size), n * size, "responses", num_tokens * self._rollouts.num_engines)

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
        metrics = self._choice_metrics(choice)
        dropped = self.sampler.drop(set(choice.left_out))
        taken = self.groups.remove(choice.chosen)
        self.queue.remove(choice)
        if not self._runs_ahead:
            self.sampler.rest()
        samples = []
        for group in taken:
            for sample in group.samples:
                sample.prompt_index = places[group.position]
            samples += group.samples
        warn_of_lost(samples)

        earlier = self._usage
        self._usage = replace(self.sampler.usage)
        usage = self._usage.since(earlier)
        now = time.perf_counter()
        seconds = now - self._since
        self._since = now

        own = sum(group.num_tokens for group in dropped), usage.busy_frac, waited / seconds
        nums_dropped, busy_fracs, waited_fracs = zip(*self._exchange.all_gather(own), strict=True)
        self.queue.adapt_lookahead(max(waited_fracs))
        if self._runs_ahead:
            metrics |= {
                "rollout/queue": len(self.queue.finished),
                "timing/engines_idle_frac": 1 - sum(busy_fracs) / self._rollouts.num_engines,
                "timing/trainers_idle_frac": waited / seconds,
            }
        if self._config.data.gen_batch_size is not None:
            metrics["over_sampling/dropped_tokens"] = sum(nums_dropped)
        parts = _scorings([*taken, *dropped])
        return StepResponses(prompts, samples, parts, usage, sum(nums_dropped), metrics, seconds=seconds)

    def _choice_metrics(self, choice: Choice) -> dict[str, float]:
        """Return how many groups the step has left out, and why."""
        is_equal = {facts.position: facts.is_equal for facts in self.queue.finished}
        num_kept = sum(is_equal[position] for position in choice.chosen)
        left_out = Counter(is_equal.get(position, "unfinished") for position in choice.left_out)
        metrics = {}
        filters = self._config.algorithm.filter_groups.enable
        if filters:
            metrics |= {
                "filter_groups/num_gen_batches": choice.num_draws,
                "filter_groups/equal_groups": left_out[True] + num_kept,
                "filter_groups/equal_groups_kept": num_kept,
                "filter_groups/surplus_groups": left_out[False],
            }
        if self._config.data.gen_batch_size is not None:
            metrics["over_sampling/unfinished_groups"] = left_out["unfinished"]
            if not filters:
                metrics["over_sampling/surplus_groups"] = left_out[False]
        return metrics

    def _with_baselines(self, rows: Rows, greedy: Responses) -> Rows:
        """Add `baselines`: the shaped score of the greedy response to each row's prompt."""
        exchange = self._exchange
        greedy.fill_grades()
        indices = torch.tensor([one.prompt_index for one in greedy.samples], dtype=torch.int64)
        lengths = torch.tensor([one.num_policy_tokens for one in greedy.samples], dtype=torch.int64)
        scores = self._row_builder.scores(greedy.samples, exchange.all_gather(score_counts(greedy.samples)))
        shaped, _ = shape_scores(
            total_scores(scores),
            lengths,
            indices,
            self._config.reward,
            RunningMoments(),
            max_response_length=self._config.rollout.max_response_length,
            process_group=exchange.group,
        )
        baselines = exchange.merge(dict(zip(indices.tolist(), shaped.tolist(), strict=True)))
        values = torch.tensor([baselines[prompt] for prompt in rows.prompt_ids.tolist()], dtype=torch.float32)
        return replace(rows, fields=rows.fields | {"baselines": values})


def make_batches(
    datasets: Datasets,
    rollouts: Rollouts,
    engines: InferenceEngines | NoEngines,
    record: Record | None,
    progress: Progress,
    cleanup: ExitStack,
) -> SampledBatches:
    """Return the batches of a run, with what an earlier process has sampled ahead; all ranks together.

    Args:
        engines: their weights are synced after each step.
        progress: progress of the checkpoint that the run resumes from.
        cleanup: ends the sampling however the run ends.
    """
    config = rollouts.config
    runs_ahead = config.rollout.runs_ahead and config.recipe.has_steps
    journal = NoJournal()
    if runs_ahead:
        settings = rollout_settings(config) | {"rollout.max_staleness": config.rollout.max_staleness}
        number = rollouts.restarts.engine_handle.number
        journal = Journal(Path(config.trainer.output_dir), number, rollouts.num_engines, settings)
    batches = SampledBatches(datasets, rollouts, engines.sleep, record, num_drawn=progress.num_drawn, journal=journal)
    if runs_ahead:
        batches.restore(progress)
    sampler = batches.sampler
    rollouts.restarts.on_restart = sampler.resume
    rollouts.hold = sampler.held
    if config.rollout.on_sync == "finish":
        engines.hold = partial(sampler.held, until_idle=True)
    cleanup.callback(sampler.close)
    return batches


def _scorings(groups: Sequence[Group]) -> list[Responses | Group]:
    """Return what scores these groups, each once."""
    scorings = [group if group.scoring is None else group.scoring for group in groups if group.samples]
    return list({id(one): one for one in scorings}.values())


def _is_repeated(config: Config) -> bool:
    """Return whether the earlier run of the output folder, if there was one, had the same config."""
    file = Path(config.trainer.output_dir, CONFIG_FILE)
    return file.exists() and not changes_since(file, config)
