"""Runs on examples: their parts, and a step of one optimizer step. Other recipes may use the update alone, `learn`."""

from collections.abc import Callable
from functools import partial

from megappo.config.schema import Config
from megappo.models.train_engine import LossFn
from megappo.observe.metrics import Reduced
from megappo.trainer.example_batches import Measure, evaluate_examples
from megappo.trainer.progress import Experience
from megappo.trainer.run import Run
from megappo.trainer.run_builder import RunBuilder
from megappo.trainer.update import update

LossOf = Callable[[Config, int, int], LossFn]
"""(config, tokens with mask 1, rows) of a batch -> its loss."""


def build_examples(builder: RunBuilder, measure: Measure) -> Run:
    """Build a run on examples, which has one model and no engines.

    Args:
        measure: returns the metrics of held-out rows.
    """
    builder.build_models()
    builder.connect()
    return builder.run(builder.rollout_batches(), evaluation=partial(evaluate_examples, measure))


def example_step(run: Run, step: int, loss_of: LossOf) -> Reduced:
    """Run one step on examples and return its metrics, the same on every rank."""
    batch, metrics = run.batches.score(step, None, run.phase)  # phase "read"
    metrics = learn(run, Experience(step, batch, metrics), loss_of)
    if run.is_due(step, run.config.eval_interval):
        metrics |= run.evaluate(step)  # phase "evaluate"
    return metrics


def learn(run: Run, experience: Experience, loss_of: LossOf) -> Reduced:
    """Make one optimizer step of the run's only trained model, and return the metrics of the step, which is finished.

    Args:
        experience: its rows, and its metrics so far.
    """
    models = run.models
    phase = run.phase
    [name] = models.training
    with phase("scatter"):
        shards = models.scatter(experience.batch)
    models.scatter_fields(shards, experience.batch, experience.step)
    with phase(f"update_{name}"):
        update(shards[name], run.config, 1, partial(loss_of, run.config))
    with phase("gather_metrics"):
        metrics = run.end_updates(experience, shards)
    run.progress.note_drawn(run.batches)
    run.progress.finish(experience)
    return metrics
