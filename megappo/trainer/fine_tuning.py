"""A step of supervised fine-tuning: one optimizer step on examples, with a loss on the responses."""

from functools import partial
from typing import Any

from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.models.megatron_engine import Outputs
from megappo.models.train_engine import LossFn
from megappo.ppo.reductions import Normaliser
from megappo.ppo.supervised import nll_loss
from megappo.trainer.objectives import LossPart, prefixed
from megappo.trainer.progress import Experience
from megappo.trainer.run import Run
from megappo.trainer.update import update


def sft_step(run: Run, step: int) -> dict[str, Any]:
    """Run one step and return its metrics, the same on every rank."""
    models, phase = run.models, run.phase
    batch, metrics = run.batches.score(step, None, phase)  # phase "read"
    experience = Experience(step, batch, metrics)
    with phase("scatter"):
        shards = models.scatter(batch)
    models.scatter_fields(shards, batch, step)  # of the step, its number alone
    with phase("update_actor"):
        update(shards["actor"], run.config, 1, partial(sft_loss, run.config))
    with phase("gather_metrics"):
        metrics = run.end_updates(experience, shards)
    metrics["data/tokens_per_second"] = metrics["data/num_tokens"] / phase.seconds("update_actor")
    run.progress.num_drawn = run.batches.num_drawn
    run.progress.finish(experience)
    if run.is_due(step, run.config.eval_interval):
        metrics |= run.evaluate(step)  # phase "evaluate"
    return metrics


def sft_loss(config: Config, num_tokens: int, num_sequences: int) -> LossFn:
    """Return the negative log-likelihood of a batch's responses.

    Args:
        num_tokens: tokens with mask 1 of the whole batch. num_sequences: its rows.
    """
    normaliser = Normaliser(num_tokens, num_sequences, config.data.max_length)

    def loss_fn(outputs: Outputs, rows: Rows) -> LossPart:
        loss, metrics = nll_loss(outputs["log_probs"], rows.response_mask, normaliser)
        return loss, prefixed("actor", metrics)

    return loss_fn
