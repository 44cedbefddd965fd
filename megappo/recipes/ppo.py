"""trainer.kind ppo: engines sample the actor's responses, rewards score them, and critic and actor are trained on them.

Steps are counted from 1; step 0 is the model before training.
"""

from functools import partial
from typing import Any

from megappo.observe.metrics import Reduced
from megappo.trainer.experience import add_advantages
from megappo.trainer.loop import train
from megappo.trainer.models import Shards
from megappo.trainer.progress import Experience
from megappo.trainer.run import Run
from megappo.trainer.run_builder import RunBuilder


def build(builder: RunBuilder, **own: Any) -> Run:
    """Build the parts of the run on this rank; all ranks together.

    Args:
        own: further parts, of a recipe that runs the same step.
    """
    builder.build_models()
    builder.connect()
    return builder.run(builder.rollout_batches(), **own)


def ppo_step(run: Run, step: int) -> Reduced:
    """Run one step of PPO and return its metrics, the same on every rank."""
    models, phase = run.models, run.phase
    experience, shards = run.experience(step, sample_experience)  # below
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


def sample_experience(run: Run, step: int) -> tuple[Experience, Shards]:
    """Sample and score responses, and return them with their advantages, and their rows at the models."""
    models, phase = run.models, run.phase
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
    others = models.forward_others(shards, phase)  # further critics, teachers, models of extensions
    with phase("gather"):
        batch = models.gather(shards, log_probs | values | ref_log_probs | others, batch)
        batch = run.scorer.add_scores(batch, conversations, model_scores)
    with phase("advantages"):
        experience = add_advantages(run.config, run.exchange, run.progress, step, batch, metrics)
    run.keep_rollouts(experience, responses)
    return experience, shards


loop = partial(train, make_step=ppo_step)
