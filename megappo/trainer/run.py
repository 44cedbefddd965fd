"""The parts of a run on this rank, and what happens around its steps: checkpoints, interruptions, logging."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megappo.batch.exchange import Exchange, OtherRankError
from megappo.batch.rows import Rows
from megappo.checkpoint.folders import CheckpointError, step_of
from megappo.config.schema import Config
from megappo.config.trainer_section import EVAL_INTERVAL
from megappo.observe.findings import Unhealthy
from megappo.observe.loggers import RunEnd
from megappo.observe.metrics import Reduced, reduce_ranks
from megappo.observe.observer import NullObserver, Observer
from megappo.observe.timeline import append_phases
from megappo.preflight.folder_lock import check_lock
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.kept import keep_rollouts
from megappo.rollouts.responses import Responses
from megappo.rollouts.rollouts import Rollouts, raise_if_interrupted
from megappo.rollouts.step_responses import StepResponses
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.interruption import INTERRUPTION, deadline
from megappo.trainer.evaluation import evaluate
from megappo.trainer.experience import compare_engines
from megappo.trainer.inference import InferenceEngines, NoEngines
from megappo.trainer.models import Models, Phases, Shards
from megappo.trainer.progress import Experience, Progress
from megappo.trainer.response_scorer import NoResponseScorer, ResponseScorer
from megappo.trainer.statistics import Utilisation, merge_optimizer_steps, training_metrics
from megappo.trainer.value_metrics import GateProgress

NUM_SHOWN = 3
"""Responses beside a finding of a run's health."""


@dataclass
class Run:
    """The parts of a run. All ranks call every method together; an absent part is a null object.

    Attributes:
        rollouts: samples from the engines, if the run has any.
        batches: yields each step's rows: `sample` requests responses, `score` returns their rows and metrics.
        evaluation: evaluates the model after a step, and returns the metrics; None = the policy's held-out responses.
        gate: ends a run that trains a critic alone.
        shown: the first rows of the last trained step on this rank.
    """

    config: Config
    exchange: Exchange
    datasets: Datasets
    models: Models
    engines: InferenceEngines | NoEngines
    rollouts: Rollouts
    batches: Any
    progress: Progress
    observer: Observer | NullObserver
    phase: Phases
    utilisation: Utilisation
    scorer: ResponseScorer | NoResponseScorer = field(default_factory=NoResponseScorer)
    evaluation: Callable[["Run", int], Reduced] | None = None
    gate: GateProgress = field(default_factory=GateProgress)
    shown: Rows | None = None

    def __post_init__(self) -> None:
        # A reward function may end the run: complete a checkpoint that is on the disk by then.
        self.phase.before["reward"] = self.finish_save_if_written

    def evaluate(self, step: int) -> Reduced:
        """Return `val/<dataset>/*` of every held-out data set."""
        with self.phase("evaluate"):
            if self.evaluation is not None:
                return self.evaluation(self, step)
            return evaluate(self.rollouts, self.datasets, self.observer, step, self._grade_held_out)

    def _grade_held_out(self, responses: Mapping[str, Responses]) -> None:
        """Add the reward model's scores to held-out responses; the engines sleep meanwhile."""
        self.engines.sleep()
        for name, of_dataset in responses.items():
            self.scorer.grade(of_dataset, self.datasets.val[name], self.phase)
        with self.phase("sync"):
            self.engines.wake()

    def begin_training(self) -> None:
        """Begin the first step: from here on a signal or the time limit ends the run with a checkpoint."""
        settings = self.config.trainer
        self._note_step(self.progress.start_step + 1)
        gc.collect()
        gc.freeze()  # saves collect garbage, and need not search what was built before training
        self.phase.timers.restart()
        INTERRUPTION.begin_saving(deadline(settings.time_limit, settings.grace_seconds))

    def _note_step(self, step: int) -> None:
        total = self.config.trainer.total_steps
        heartbeat.step = f"step {step}/{total}" if step <= total else ""

    def check_interrupted(self) -> None:
        """Agree with all ranks whether to stop.

        Raises:
            Interrupted: on all ranks, if any has a reason to stop.
            Unhealthy: on all ranks, if rank 0 has found what trainer.stop_on names.
        """
        raise_if_interrupted(self.exchange)
        if self.config.trainer.stop_on:
            reason, *_ = self.exchange.all_gather(self.observer.stop_reason)
            if reason:
                raise Unhealthy(reason)

    def experience(
        self, step: int, make: Callable[["Run", int], tuple[Experience, Shards]]
    ) -> tuple[Experience, Shards]:
        """Return a step's rows with their advantages, and the same rows at the models.

        They are made and kept until the step is finished. A run that was interrupted in the step's updates gets what it
        kept, and the updates continue.
        """
        experience = self.progress.experience
        if experience is None:
            experience, shards = make(self, step)
            # The engines should have sampled as the actor would.
            experience.metrics |= self.engines.check_rollouts(experience.metrics)
            self.progress.begin(experience, self.batches)
            return experience, shards
        with self.phase("scatter"):
            self.engines.sleep()  # the first sync has woken them
            shards = self.models.scatter(experience.batch)
        for name, shard in shards.items():
            shard.num_updates = experience.num_updates.get(name, 0)
        return experience, shards

    def keep_rollouts(self, experience: Experience, responses: StepResponses | None) -> None:
        """Keep the first rows of a step in the output folder, if they are due."""
        settings = self.config.trainer
        step = experience.step
        interval = settings.keep_rollouts
        if interval is None:
            interval = self.config.eval_interval or EVAL_INTERVAL
        if self.is_due(step, interval) or (interval and step == 1):
            with self.phase("keep_rollouts"):
                keep_rollouts(Path(settings.output_dir), step, experience.batch, responses, self.rollouts)

    def end_updates(self, experience: Experience, shards: Shards) -> Reduced:
        """Return the step's metrics so far, with the metrics of the updates on all ranks. All ranks wait for the
        slowest.

        Raises:
            Interrupted: the updates were interrupted.
        """
        trained = self.models.trained_in(experience.step)
        local = {}
        for name in trained:
            shard = shards[name]
            seconds = self.phase.seconds(f"update_{name}")
            local[name] = (shard.num_updates, shard.optimizer_steps, seconds)
        updates, memory = zip(*self.exchange.all_gather((local, self.phase.memory())), strict=True)
        if self.config.old_log_probs == "update" and any(of_rank["actor"][1] for of_rank in updates):
            actor = shards["actor"]
            experience.batch = actor.gather(actor.outputs, {"log_probs": "old_log_probs"}, experience.batch)
            compare_engines(self.config, self.exchange, experience)
            experience.metrics |= self.engines.check_rollouts(experience.metrics)
        metrics = experience.metrics | reduce_ranks(memory)
        rows = experience.batch.rows
        self.shown = rows.select(range(min(len(rows), NUM_SHOWN)))
        is_interrupted = False
        for name in trained:
            counts, steps, seconds = zip(*(of_rank[name] for of_rank in updates), strict=True)
            experience.add(name, max(counts), merge_optimizer_steps(steps, name))
            is_interrupted |= max(counts) < self.models.training[name].epochs * len(shards[name].split)
            metrics |= training_metrics(experience.optimizer_steps[name], name)
            if "data/num_tokens" in metrics:
                metrics["data/tokens_per_second"] = metrics["data/num_tokens"] / max(seconds)
            metrics[f"{name}/mfu"] = self.utilisation.mfu(shards[name], max(map(len, steps)), max(seconds))
        if is_interrupted:
            self.check_interrupted()
        return metrics

    def is_due(self, step: int, interval: int) -> bool:
        """Return whether something that is due every `interval` steps, and after the last, is due after this step."""
        return interval > 0 and (step % interval == 0 or step == self.config.trainer.total_steps)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log a step's metrics and complete a checkpoint that was written meanwhile.

        A step's `timing_s/save` is the time of the checkpoint between the previous step and this one.
        """
        saves = {"checkpoint/failed_saves": self.progress.failed_saves}
        self.observer.log(step, {**metrics, **self.phase.timers.lap(), **saves}, self.responses)
        intervals = self.phase.timers.take_intervals()
        append_phases(self.config.trainer.output_dir, self.exchange.rank, step, intervals)
        self._note_step(step + 1)
        self.finish_save_if_written()

    def responses(self) -> list[dict[str, Any]]:
        """Return the prompts, responses and scores of the rows in `shown`."""
        records = []
        if self.shown is not None:
            decode = self.rollouts.tokenizer.decode
            lengths = self.shown.prompt_lengths.tolist()
            scores = self.shown.fields["scores"].tolist()
            for tokens, length, score in zip(self.shown.sequences, lengths, scores, strict=True):
                prompt = self.rollouts.prompt_text(tokens[:length])
                response = decode(tokens[length:])
                records.append({"prompt": prompt, "response": response, "score": score})
        return records

    def save_if_due(self, step: int) -> None:
        """Save every trainer.save_interval steps, after the last step, and after a save that failed."""
        settings = self.config.trainer
        is_last = step == settings.total_steps
        if is_last:
            self.save()
        elif self.is_due(step, settings.save_interval) or self.progress.is_overdue:
            self.batches.prepare_save()
            self.save(in_background=settings.async_save, may_fail=True)
            with self.phase("sync"):
                self.engines.wake()

    def save(self, *, in_background: bool = False, may_fail: bool = False) -> None:
        """Write a checkpoint while the engines sleep. A save in the background is completed first.

        Args:
            in_background: write a copy while training continues; `finish_save` completes it.
            may_fail: warn about a failed save, count it, and retry after the next step.
        Raises:
            CheckpointError, OtherRankError: the checkpoint cannot be written.
            FloatingPointError, OtherRankError: weights are not finite.
        """
        self.finish_save()
        self._check_lock()
        self.engines.sleep()  # saving takes memory
        with self.phase("save"):
            self.models.check_finite(self.exchange)
            with self._failing_save(may_fail):
                self.progress.begin_save(self.models, in_background=in_background)
        if not in_background:
            self.finish_save(may_fail=may_fail)

    def finish_save(self, *, may_fail: bool = True) -> None:
        """Wait for the checkpoint that is being written, if any, and complete it.

        Raises:
            CheckpointError, OtherRankError: it cannot be written, and `may_fail` is False.
        """
        if self.progress.store.is_saving:
            self._check_lock()
            with self.phase("finish_save"), self._failing_save(may_fail):
                self.progress.checkpoint = checkpoint = self.progress.store.finish()
                self.observer.checkpoint(step_of(checkpoint), checkpoint)
                self.batches.forget_saved(step_of(checkpoint))

    def _check_lock(self) -> None:
        self.exchange.on_rank_0(lambda: check_lock(Path(self.config.trainer.output_dir)))

    def finish_save_if_written(self) -> None:
        """Complete a checkpoint that all ranks have written."""
        if self.progress.store.is_written():
            self.finish_save()

    @contextmanager
    def _failing_save(self, may_fail: bool) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, OtherRankError) as error:
            if not may_fail:
                raise
            self.progress.is_overdue = True
            self.progress.failed_saves += 1
            self.observer.message(f"WARNING: {error}: the save is retried after the next step")

    def save_if_needed(self) -> None:
        """Save what the newest checkpoint lacks. The engines are stopped: they are no longer needed."""
        self.finish_save()
        if not self.progress.is_saved:
            self.batches.prepare_save()
            self.engines.stop()
            self.save()

    def finish(self) -> None:
        """Save the last step, if the critic's gate has ended the run; export the model and report.

        Raises:
            Interrupted: the resumed run exports.
        """
        if self.gate.ends_run:
            self.save_if_needed()
        INTERRUPTION.end_saving()
        self.check_interrupted()
        if self.config.trainer.export_hf and self.models.training:
            with self.phase("export"):
                self.models.export()
        self.exchange.all_gather(None)
        if self.gate.is_set:
            self.observer.message(self.gate.describe())
        self.observer.end(RunEnd())
