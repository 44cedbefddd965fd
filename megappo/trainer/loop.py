"""The training loop. Every rank runs the same lines; what does not live on a rank is a null object there."""

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megappo.config.schema import Config
from megappo.engines.restarts import EngineLost, EngineLostElsewhere
from megappo.observe.metrics import reduce_ranks
from megappo.runtime.interruption import INTERRUPTION, Interrupted, deadline
from megappo.trainer.component import Scattered
from megappo.trainer.evaluation import evaluate
from megappo.trainer.experience import add_advantages
from megappo.trainer.in_flight import InFlight, UpdateHere
from megappo.trainer.run import Run
from megappo.trainer.statistics import training_metrics


class Trainer:
    """PPO: roll out, score, forward passes of actor, reference and critic, update both, resynchronise.

    Steps are counted from 1; step 0 stands for the model as it was given.
    """

    def __init__(self, config: Config, run: Run):
        self.config = config
        self.run = run

    def train(self) -> None:
        """From the newest checkpoint, or the beginning, to the last step; then the final checkpoint and the export.

        A step's `timing_s/save` is of the checkpoint between the step before and this one.

        Raises:
            Interrupted: the run was asked to end, on any rank, or its time is over; everything is saved.
            EngineLost, EngineLostElsewhere: an engine has failed too often; everything is saved.
        """
        run, total = self.run, self.config.trainer.total_steps
        is_new = run.progress.checkpoint is None  # else it may be in the middle of step 1
        with run.phase("sync"):
            # Servers that run already may hold what a run before has left there.
            as_loaded = is_new and not self.config.rollout.engines
            run.engines.first_sync(verify=self.config.proves_weights, as_loaded=as_loaded)
        if run.progress.start_step == total:
            run.observer.message(f"nothing left to do: raise trainer.total_steps (now {total}) to train on")
        if is_new and self.config.eval_interval:
            run.observer.log(0, self.evaluate(0))
        gc.collect()
        gc.freeze()  # what is there by now stays, and a save, which collects, need not look at all of it
        run.phase.timers.restart()
        INTERRUPTION.begin_saving(deadline(self.config.trainer.time_limit, self.config.trainer.grace_seconds))
        try:
            run.check_interrupted()
            for step in range(run.progress.start_step + 1, total + 1):
                self._step_with_all_around_it(step)
            INTERRUPTION.end_saving()
            run.check_interrupted()  # the export has time when the run is started again
        except (Interrupted, EngineLost, EngineLostElsewhere):
            run.save_if_needed()
            raise
        run.finish()

    def _step_with_all_around_it(self, step: int) -> None:
        run = self.run
        metrics = self.step(step)
        metrics |= run.phase.timers.lap() | {"checkpoint/failed_saves": run.progress.failed_saves}
        run.observer.log(step, metrics)
        is_last = step == self.config.trainer.total_steps
        run.finish_save_if_written()
        if self._is_due(step, self.config.trainer.save_interval) or run.progress.is_overdue:
            in_background = self.config.trainer.async_save and not is_last
            run.save(in_background=in_background, may_fail=not is_last)  # here: what it covers has been logged
            if not is_last:
                with run.phase("sync"):
                    run.engines.wake()
                run.check_interrupted()  # it has taken a while

    def _is_due(self, step: int, interval: int) -> bool:
        last = step == self.config.trainer.total_steps
        return last or (interval > 0 and step % interval == 0)

    def step(self, step: int) -> dict[str, Any]:
        """One PPO step, or what is left of it; returns its metrics, the same on every rank."""
        run = self.run
        if run.progress.in_flight is None:
            scattered = self._begin(step)
        else:
            with run.phase("scatter"):
                run.engines.sleep()  # the first sync has woken them
                scattered = run.models.scatter(run.progress.in_flight.batch)
            run.progress.in_flight.resume(scattered)
        return self._end(run.progress.in_flight, scattered)

    def _begin(self, step: int) -> Mapping[str, Scattered]:
        """From prompts to rows with their advantages, which are in flight then; the same rows at the components."""
        run = self.run
        if run.rollouts is None:  # others look while they sample
            run.check_interrupted()
        batch, metrics = run.batches(step, run.phase, run.finish_save_if_written)
        with run.phase("scatter"):
            scattered = run.models.scatter(batch)
        outputs = run.models.forward(scattered, run.phase)
        with run.phase("gather"):
            rows = run.models.gather(scattered, outputs, batch.rows)
        with run.phase("advantages"):
            judged = add_advantages(run, rows)
            metrics |= run.engines.check_rollouts(judged.log_prob_diff)
        batch = replace(batch, rows=judged.rows)
        flight = InFlight(step, batch, metrics | judged.metrics, judged.kl_penalty)
        run.progress.begin(flight, run.batches.num_drawn)
        return scattered

    def _end(self, flight: InFlight, scattered: Mapping[str, Scattered]) -> dict[str, Any]:
        """The updates, and what follows from them; the step's metrics."""
        run, metrics = self.run, dict(flight.metrics)
        with run.phase("scatter_fields"):
            run.models.scatter_fields(scattered, flight.batch.rows, flight.step)
        optimizer_steps = run.models.update(scattered, flight.step, run.phase)
        with run.phase("gather_metrics"):  # not earlier: all ranks wait for each other here
            mine = {
                name: UpdateHere.of(scattered[name], steps, run.phase.seconds(f"update_{name}"))
                for name, steps in optimizer_steps.items()
            }
            of_ranks, memory = zip(*run.exchange.share((mine, run.phase.memory())), strict=True)
            interrupted, updates = flight.add(scattered, of_ranks)
            if interrupted:
                run.check_interrupted()
            metrics |= reduce_ranks(memory)
            for name, update in updates.items():
                metrics |= training_metrics(flight.optimizer_steps[name], name)
                metrics[f"{name}/mfu"] = run.utilisation.of_update(scattered[name], update)
        actor_trained = "actor" in optimizer_steps
        with run.phase("sync"):
            metrics |= run.engines.sync(changed=actor_trained)
        if self.config.eval_interval and self._is_due(flight.step, self.config.eval_interval):
            with run.phase("evaluate"):  # while the step is in flight: interrupted here, it goes on with this
                metrics |= self.evaluate(flight.step)
        if flight.kl_penalty is not None and actor_trained:
            num_responses = self.config.data.train_batch_size * self.config.rollout.n  # rows may be segments of them
            run.progress.kl.update(flight.kl_penalty, num_responses)
        run.progress.finish(flight.step)
        return metrics

    def evaluate(self, step: int) -> dict[str, Any]:
        """`val/<dataset>/*` on every held-out prompt of each file, and a few samples logged."""
        run = self.run
        return evaluate(run.rollouts, run.datasets, run.observer, step)
