"""The training loop. Every rank runs the same lines; what does not live on a rank is a null object there."""

from dataclasses import replace
from functools import partial

from megappo.config.schema import Config
from megappo.data.batch import Rows
from megappo.ppo.advantages import ESTIMATORS, explained_variance, whiten
from megappo.ppo.kl import kl_estimate
from megappo.rollout.client import EngineError
from megappo.trainer.component import Batch, Borrowed, train
from megappo.trainer.losses import actor_loss, critic_loss
from megappo.trainer.run import Run
from megappo.trainer.statistics import field_statistics, training_metrics, value_statistics


class Trainer:
    """PPO: roll out, score, look at the rollouts with actor, reference and critic, update both, resynchronise.

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
        run.sync_weights()
        if run.start_step == total:
            run.observer.message(f"nothing left to do: raise trainer.total_steps (now {total}) to train on")
        if run.start_step == 0 and self.config.trainer.eval_interval:
            run.observer.log(0, self.evaluate(0))
        run.timers.restart()
        for step in range(run.start_step + 1, total + 1):
            metrics = self.step(step)
            metrics |= run.lap()
            metrics["rollout/tokens_per_second"] = metrics["rollout/num_tokens"] / metrics["timing_s/rollout"]
            if self.config.trainer.eval_interval and self._is_due(step, self.config.trainer.eval_interval):
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

    def step(self, step: int) -> dict[str, float]:
        """One PPO step; returns its metrics, the same on every rank."""
        run, config = self.run, self.config
        prompts, n = run.train_prompts.batch(step - 1), config.rollout.n
        with run.timers("rollout"):
            samples = run.rollouts.sample(prompts, n, run.rollouts.training, "rollout")
            run.engine_sleep()
        with run.timers("reward"):
            scores = run.rollouts.score(samples, prompts)
            batch, metrics = run.rollouts.collect(samples, scores, prompts, n)
        with run.timers("borrow"):
            mini_batches = config.data.train_batch_size
            at_actor = run.actor.borrow(batch, mini_batches // config.actor.ppo_mini_batch_size)
            at_critic = run.critic.borrow(batch, mini_batches // config.critic.ppo_mini_batch_size)
        rows = self.look_at(batch, at_actor, at_critic)
        with run.timers("advantages"):
            rows, advantage_metrics = self.add_advantages(rows)
        with run.timers("update_critic"):
            at_critic.receive(rows, ["values", "returns"])
            critic_steps = train(at_critic, config.critic.ppo_epochs, partial(critic_loss, config.critic))
        with run.timers("update_actor"):
            at_actor.receive(rows, ["old_log_probs", "advantages"])
            actor_steps = train(at_actor, config.actor.ppo_epochs, partial(actor_loss, config.actor))
            # Not earlier: it would keep a critic and an actor on different ranks from training at once.
            metrics |= training_metrics(run.exchange, critic_steps, "critic")
            metrics |= training_metrics(run.exchange, actor_steps, "actor")
        with run.timers("sync"):
            run.engine_wake()
            metrics |= run.sync_weights()
        return metrics | advantage_metrics

    def look_at(self, batch: Batch, at_actor: Borrowed, at_critic: Borrowed) -> Rows:
        """Adds `old_log_probs`, `ref_log_probs` (with a reference) and `values` to the rows at home."""
        run, rows = self.run, batch.rows
        with run.timers("old_log_probs"):
            rows = at_actor.forward(rows, {"log_probs": "old_log_probs"})
        if run.ref is not None:
            with run.timers("ref_log_probs"):
                rows = run.ref.borrow(batch).forward(rows, {"log_probs": "ref_log_probs"})
        with run.timers("values"):
            return at_critic.forward(rows, {"values": "values"})

    def add_advantages(self, rows: Rows) -> tuple[Rows, dict[str, float]]:
        """Adds `advantages` and `returns`; the metrics are over the rows of all ranks."""
        run, algorithm = self.run, self.config.algorithm
        fields, mask = rows.fields, rows.response_mask
        rewards, kl = fields["token_level_scores"], {}
        if run.ref is not None:
            penalty = kl_estimate(fields["old_log_probs"], fields["ref_log_probs"], algorithm.kl_penalty)
            rewards = rewards - run.kl.value * penalty * mask
            kl = {"reward/kl_penalty": penalty}
        estimate = ESTIMATORS[algorithm.adv_estimator]
        advantages, returns = estimate(rewards, fields["values"], mask, algorithm.gamma, algorithm.lam)
        if algorithm.whiten_advantages:
            advantages = whiten(advantages, mask, group=run.exchange.group)
        rows = replace(rows, fields=fields | {"advantages": advantages, "returns": returns})
        statistics = {"advantages": advantages, "returns": returns, "values": fields["values"]}
        metrics = field_statistics(run.exchange, rows, statistics | kl | self._log_prob_diff(rows))
        metrics["critic/vf_explained_var"] = explained_variance(
            fields["values"], returns, mask, group=run.exchange.group
        )
        self._check_probe(metrics)
        if run.ref is not None:
            metrics["reward/kl_coef"] = run.kl.value
            run.kl.update(metrics["reward/kl_penalty/mean"], self.config.data.train_batch_size * self.config.rollout.n)
        return rows, metrics

    @staticmethod
    def _log_prob_diff(rows: Rows) -> dict:
        difference = (rows.fields["old_log_probs"] - rows.fields["rollout_log_probs"]).abs()
        return {"rollout/log_prob_diff": difference}

    def _check_probe(self, metrics: dict[str, float]) -> None:
        """The proof of the last weight sync: the engine's log-probs of the rollouts are the trainer's.

        Raises:
            EngineError: they differ by more than `rollout.sync.probe_tolerance` on average.
        """
        found, tolerance = metrics["rollout/log_prob_diff/mean"], self.config.rollout.sync.probe_tolerance
        if not found <= tolerance:
            raise EngineError(
                f"trainer and SGLang engine disagree about the rollouts' log-probs by {found:.3g} on average, more "
                f"than rollout.sync.probe_tolerance = {tolerance}: the engine does not run the actor's weights"
            )

    def evaluate(self, step: int) -> dict[str, float]:
        """`val/<dataset>/score/*` on every held-out prompt of each file, and a few samples logged."""
        metrics = {}
        for name, prompts in self.run.val_prompts.items():
            scores, samples = self.run.rollouts.evaluate(prompts)
            metrics |= value_statistics(self.run.exchange, {f"val/{name}/score": scores})
            self.run.observer.samples(step, samples)
        return metrics
