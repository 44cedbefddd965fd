"""A step on examples: one optimizer step of a policy, with a loss on the responses, or of a reward model, on pairs."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megappo.batch.rows import Rows
from megappo.config.schema import Config
from megappo.models.megatron_engine import Outputs
from megappo.models.train_engine import LossFn
from megappo.ppo.reductions import Normaliser
from megappo.ppo.supervised import nll_loss, preference_loss
from megappo.trainer.example_batches import pair_scores
from megappo.trainer.objectives import LossPart, prefixed
from megappo.trainer.progress import Experience
from megappo.trainer.run import Run
from megappo.trainer.update import update


def example_step(run: Run, step: int) -> dict[str, Any]:
    """Run one step and return its metrics, the same on every rank."""
    models = run.models
    phase = run.phase
    [name] = models.training
    batch, metrics = run.batches.score(step, None, phase)  # phase "read"
    experience = Experience(step, batch, metrics)
    with phase("scatter"):
        shards = models.scatter(batch)
    models.scatter_fields(shards, batch, step)
    with phase(f"update_{name}"):
        update(shards[name], run.config, 1, partial(LOSSES[name], run.config))
    with phase("gather_metrics"):
        metrics = run.end_updates(experience, shards)
    metrics["data/tokens_per_second"] = metrics["data/num_tokens"] / phase.seconds(f"update_{name}")
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


def reward_model_loss(config: Config, num_tokens: int, num_sequences: int) -> LossFn:
    """Return the Bradley-Terry loss of a batch's pairs; arguments as of `sft_loss`."""

    def loss_fn(outputs: Outputs, rows: Rows) -> LossPart:
        chosen, rejected = pair_scores(outputs)
        margins = rows.fields["margins"][::2]
        coef = config.reward_model.center_coef
        loss, metrics = preference_loss(chosen, rejected, margins, num_sequences // 2, coef)
        return loss, prefixed("reward_model", metrics)

    return loss_fn


LOSSES: dict[str, Callable[[Config, int, int], LossFn]] = {"actor": sft_loss, "reward_model": reward_model_loss}
"""Trained component -> its loss on examples."""
