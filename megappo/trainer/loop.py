"""The training loop. Every rank runs the same lines; what does not live on a rank is a null object there."""

from dataclasses import dataclass
from typing import Any

from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.trainer.component import Scattered
from megappo.trainer.experience import add_advantages
from megappo.trainer.probe import check_log_probs
from megappo.trainer.run import Run
from megappo.trainer.statistics import training_metrics, value_metrics
from megappo.trainer.update import VALUE_FIELDS, actor_fields, update_actor, update_critic


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass of a step.

    Attributes:
        at: the component, which has the rows.
        names: what becomes of the outputs, see `Scattered.gather`.
    """

    phase: str
    at: Scattered
    names: dict[str, str]


class Trainer:
    """PPO: roll out, score, forward passes of actor, reference and critic, update both, resynchronise.

    Steps are counted from 1; step 0 stands for the model as it was given.
    """

    def __init__(self, config: Config, run: Run):
        self.config = config
        self.run = run

    def train(self) -> None:
        """From the newest checkpoint, or the beginning, to the last step; then the final checkpoint and the export.

        A step's `timing_s/evaluate` and `timing_s/save` are those that came between the step before and this one.
        """
        run, total = self.run, self.config.trainer.total_steps
        run.first_sync()
        if run.start_step == total:
            run.observer.message(f"nothing left to do: raise trainer.total_steps (now {total}) to train on")
        if run.start_step == 0 and self.config.eval_interval:
            run.observer.log(0, self.evaluate(0))
        run.timers.restart()
        for step in range(run.start_step + 1, total + 1):
            metrics = self.step(step)
            metrics |= run.lap()
            metrics["rollout/tokens_per_second"] = metrics["rollout/num_tokens"] / metrics["timing_s/rollout"]
            if self.config.eval_interval and self._is_due(step, self.config.eval_interval):
                with run.timers("evaluate"):
                    metrics |= self.evaluate(step)
            run.observer.log(step, metrics)
            if self._is_due(step, self.config.trainer.save_interval):  # last: what it covers has been logged
                with run.timers("save"):
                    run.save(step)
        run.finish()

    def _is_due(self, step: int, interval: int) -> bool:
        last = step == self.config.trainer.total_steps
        return last or (interval > 0 and step % interval == 0)

    def step(self, step: int) -> dict[str, Any]:
        """One PPO step; returns its metrics, the same on every rank."""
        run, config = self.run, self.config
        prompts = run.train_prompts.batch(step - 1)
        with run.timers("rollout"):
            responses = run.rollouts.respond(prompts)
            run.engine_sleep()
        with run.timers("reward"):
            batch, metrics = run.rollouts.collect(responses, prompts)
        with run.timers("scatter"):
            at_actor = run.actor.scatter(batch, config.num_mini_batches("actor"))
            at_ref = at_actor.passed_to(run.ref) if run.ref and config.needs_ref_log_probs else None
            at_critic = run.critic.scatter(batch, config.num_mini_batches("critic")) if run.critic else None
        rows = self.forward(batch.rows, at_actor, at_ref, at_critic)
        with run.timers("advantages"):
            judged = add_advantages(run, rows)
            check_log_probs("the rollouts", judged.log_prob_diff, config)
        actor_trains = step > config.critic.warmup_steps
        with run.timers("scatter_fields"):
            if at_critic is not None:
                at_critic.scatter_fields(judged.rows, VALUE_FIELDS)
            if actor_trains:
                at_actor.scatter_fields(judged.rows, actor_fields(config))
        with run.timers("update_critic"):
            critic_steps = update_critic(at_critic, config) if at_critic else []
        with run.timers("update_actor"):
            actor_steps = update_actor(at_actor, config) if actor_trains else []
            # Not earlier: all ranks wait for each other here.
            metrics |= training_metrics(run.exchange, critic_steps, "critic")
            metrics |= training_metrics(run.exchange, actor_steps, "actor")
        with run.timers("sync"):
            run.engine_wake()
            metrics |= run.sync_weights(changed=actor_trains)
        metrics |= judged.metrics
        if judged.kl_penalty is not None and actor_trains:
            run.kl.update(judged.kl_penalty, config.data.train_batch_size * config.rollout.n)
        return metrics

    def forward(self, rows: Rows, at_actor: Scattered, at_ref: Scattered | None, at_critic: Scattered | None) -> Rows:
        """Adds to the owned rows what the models say of them, as far as the config needs it."""
        timers, algorithm = self.run.timers, self.config.algorithm
        policy, values = {"log_probs": "old_log_probs"}, {"values": "values"}
        if algorithm.use_kl_in_reward and algorithm.kl_penalty == "full":
            policy["full_kl"] = "full_kl"
        if algorithm.bootstrap_truncated:
            values["bootstrap_values"] = "bootstrap_values"
        shared = algorithm.shared_backbone
        passes = [ForwardPass("old_log_probs", at_actor, policy | (values if shared else {}))]
        if at_ref is not None:
            passes.append(ForwardPass("ref_log_probs", at_ref, {"log_probs": "ref_log_probs"}))
        if at_critic is not None:
            passes.append(ForwardPass("values", at_critic, values))
        outputs = []
        for one in passes:
            with timers(one.phase):
                outputs.append(one.at.forward())
        with timers("gather"):
            for one, found in zip(passes, outputs, strict=True):
                rows = one.at.gather(found, rows, one.names)
        return rows

    def evaluate(self, step: int) -> dict[str, Any]:
        """`val/<dataset>/score/*` on every held-out prompt of each file, and a few samples logged."""
        metrics = {}
        for name, prompts in self.run.val_prompts.items():
            scores, samples = self.run.rollouts.evaluate(prompts.all)
            metrics |= value_metrics(self.run.exchange, f"val/{name}/score", scores)
            self.run.observer.samples(step, samples)
        return metrics
