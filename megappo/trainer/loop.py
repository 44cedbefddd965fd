"""PPO's training loop. Every rank runs the same lines; a model that is not on a rank is a null object there.

Steps are counted from 1; step 0 is the model before training.
"""

from collections.abc import Callable
from typing import Any

from megappo.engines.restarts import EngineLost
from megappo.observe.findings import Unhealthy
from megappo.observe.profile import profiled
from megappo.runtime.interruption import Interrupted
from megappo.trainer.experience import add_advantages
from megappo.trainer.run import Run


def train(run: Run, make_step: Callable[[Run, int], dict[str, Any]]) -> None:
    """Train from the newest checkpoint, or from the beginning, to the last step; then save and export.

    Args:
        make_step: runs one step and returns its metrics: `ppo_step`, or the step of another kind of run.
    Raises:
        Interrupted: a signal to any rank, or the time limit, stops the run. Everything is saved.
        EngineLost: an engine failed too often. Everything is saved.
        Unhealthy: a rule of trainer.stop_on began to hold. Everything is saved.
    """
    with run.phase("sync"):
        run.engines.first_sync(run.progress.start_step)
    if run.progress.is_new and run.config.eval_interval:
        run.observer.log(0, run.evaluate(0))
    elif run.gate.is_set:
        run.evaluate(run.progress.start_step)
    run.begin_training()
    try:
        for step in range(run.progress.start_step + 1, run.config.trainer.total_steps + 1):
            run.check_interrupted()
            if run.gate.ends_run:
                break
            with profiled(run.config.trainer, step, run.exchange.rank):
                metrics = make_step(run, step)
            run.log(step, metrics)
            run.save_if_due(step)
    except (Interrupted, EngineLost, Unhealthy):
        run.save_if_needed()
        raise
    run.finish()


def ppo_step(run: Run, step: int) -> dict[str, Any]:
    """Run one step of PPO and return its metrics, the same on every rank."""
    models, phase = run.models, run.phase
    experience, shards = run.resume_step()  # None, unless the run was interrupted in this step's updates
    if experience is None:
        responses = run.batches.sample(step, phase)  # phase "rollout"
        batch, metrics = run.batches.score(step, responses, phase)  # phase "reward"
        with phase("scatter"):
            shards = models.scatter(batch)
            conversations = run.scorer.scatter(batch, responses)
        with phase("old_log_probs"):
            log_probs = models.forward("actor", shards)
        with phase("values"):
            values = models.forward("critic", shards)
        with phase("ref_log_probs"):
            ref_log_probs = models.forward("ref", shards)
        model_scores = run.scorer.forward(conversations, phase)  # phase "reward_model"
        others = models.forward_others(shards, phase)  # models of extensions, each in a phase of its own
        with phase("gather"):
            batch = models.gather(shards, log_probs | values | ref_log_probs | others, batch)
            batch = run.scorer.add_scores(batch, conversations, model_scores)
        with phase("advantages"):
            experience = add_advantages(run.config, run.exchange, run.progress, step, batch, metrics)
        run.keep_rollouts(experience, responses)
        run.begin_updates(experience)
    with phase("scatter_fields"):
        models.scatter_fields(shards, experience.batch, step)
    with phase("update_critic"):
        models.update("critic", shards, step)
    with phase("update_actor"):
        models.update("actor", shards, step)
    models.update_others(shards, step, phase)
    with phase("gather_metrics"):
        metrics = run.end_updates(experience, shards)
    with phase("sync"):
        metrics |= run.engines.sync(step, changed=models.is_trained("actor", step))
    if run.is_due(step, run.config.eval_interval):
        metrics |= run.evaluate(step)  # phase "evaluate"
    run.progress.finish(experience)
    return metrics
