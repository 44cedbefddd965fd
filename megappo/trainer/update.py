"""Updates of a step: PPO's epochs over the mini-batches of the rows at a component.

The rows have the fields of the loss by now (see `placement.components.Training`). An update waits for no rank of
another component.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megappo.batch.exchange import OtherRankError
from megappo.batch.rows import Rows
from megappo.batch.rows_file import write_rows
from megappo.config.schema import Actor, Config
from megappo.models.train_engine import ELSEWHERE, LossFn, OptimizerStep, TrainedEngine
from megappo.observe.metrics import Metric
from megappo.runtime import platform
from megappo.runtime.interruption import INTERRUPTION
from megappo.trainer.component_batch import ComponentBatch
from megappo.trainer.objectives import SELECTED, ActorLoss, conventions, critic_loss
from megappo.trainer.statistics import NOT_KEPT


def update_actor(batch: ComponentBatch, config: Config) -> None:
    """Train the actor; stop once its KL to the policy before the step exceeds actor.target_kl."""
    engine, actor = batch.component.engine, config.actor
    if not isinstance(engine, TrainedEngine):
        return
    for rows, num_tokens, num_rows in _mini_batches(batch, engine, actor.ppo_epochs, config):
        loss = ActorLoss(config, num_tokens, num_rows)
        if actor.method.select is not None:
            rows = _with_selection(engine, rows, actor.method.select, actor)
        _train(batch, engine, rows, loss, config)
        if actor.target_kl is not None and engine.total(loss.policy_kl) > actor.target_kl:
            batch.num_updates = actor.ppo_epochs * len(batch.split)


def update_critic(batch: ComponentBatch, config: Config) -> None:
    """Train the critic."""
    engine = batch.component.engine
    if not isinstance(engine, TrainedEngine):
        return
    for rows, num_tokens, num_rows in _mini_batches(batch, engine, config.critic.ppo_epochs, config):
        _train(batch, engine, rows, critic_loss(config, num_tokens, num_rows), config)


def _mini_batches(
    batch: ComponentBatch, engine: TrainedEngine, ppo_epochs: int, config: Config
) -> Iterator[tuple[Rows, int, int]]:
    """Yield `ComponentBatch.mini_batches` epoch after epoch: those that remain, until the run is interrupted."""
    parts = batch.mini_batches(counts_empty_rows=conventions(config).counts_empty_rows)
    while batch.num_updates < ppo_epochs * len(parts):
        batch.interrupted = engine.anywhere(bool(INTERRUPTION.reason))
        if batch.interrupted:
            return
        batch.num_updates += 1
        yield parts[(batch.num_updates - 1) % len(parts)]


def _train(batch: ComponentBatch, engine: TrainedEngine, rows: Rows, loss: LossFn, config: Config) -> None:
    """Make one optimizer step. Rows of a skipped step are kept for inspection.

    Raises:
        FloatingPointError, OtherRankError: the trainer.max_bad_steps steps before it were skipped, too.
    """
    step = engine.train_batch(rows, loss)
    if step.skipped:
        engine.skipped_in_a_row += 1
        step = _skipped(batch, engine, rows, step, config)
    else:
        engine.skipped_in_a_row = 0
    if engine.is_output:
        batch.optimizer_steps.append(step)


def _skipped(
    batch: ComponentBatch, engine: TrainedEngine, rows: Rows, step: OptimizerStep, config: Config
) -> OptimizerStep:
    """Warn about a skipped step, or raise if too many were skipped in a row; return it with its metrics."""
    rank, limit = batch.component.exchange.rank, config.trainer.max_bad_steps
    kept, metrics = _keep_rows(batch, rows, step.skipped, config) if engine.is_output else ("", {})
    if engine.skipped_in_a_row > limit:
        if step.skipped == ELSEWHERE:
            raise OtherRankError(ELSEWHERE)
        in_a_row = f" ({engine.skipped_in_a_row} times in a row, trainer.max_bad_steps is {limit})" if limit else ""
        raise FloatingPointError(
            f"{step.skipped}{in_a_row}; no weight was changed by it. Check the rewards, advantages and log-probs of "
            f"the last steps in metrics.jsonl; if they diverge, lower optim.lr{kept}"
        )
    if step.skipped != ELSEWHERE or metrics:
        which = f"the {batch.component.name}'s update {batch.num_updates} of step {batch.step}"
        print(f"WARNING (rank {rank}): {step.skipped}: {which} is skipped{kept}", flush=True)
    return replace(step, metrics=metrics)


def _keep_rows(batch: ComponentBatch, rows: Rows, reason: str, config: Config) -> tuple[str, dict[str, Metric]]:
    """Write this rank's rows of a skipped step; return where they are, or why not, which a metric counts."""
    name, rank = batch.component.name, batch.component.exchange.rank
    file = f"step_{batch.step:08d}_{name}_{batch.num_updates:04d}_rank_{rank}.safetensors"
    path = Path(config.trainer.output_dir, "bad_steps", file)
    facts = {"step": batch.step, "weights_step": batch.step - 1, "model": config.model.path, "reason": reason}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, rows, facts)
    except OSError as error:
        return f"; its rows cannot be kept: {error}", {f"{name}/{NOT_KEPT}": Metric((1.0,), "sum")}
    return f"; its rows are in {path}", {}


def _with_selection(engine: TrainedEngine, rows: Rows, select: Callable[..., torch.Tensor], actor: Actor) -> Rows:
    """Return the rows with a field of the tokens that the loss treats differently.

    Selecting them takes the current log-probs of the whole mini-batch, so another forward pass; this makes the
    selection independent of how the mini-batch is cut.
    """
    outputs = engine.forward(rows)
    if not outputs:  # not the last stage: no loss here
        return rows
    device = platform.device()
    selected = select(
        outputs["log_probs"].to(device),
        rows.fields["advantages"].to(device),
        rows.response_mask.to(device),
        actor,
        group=engine.groups.collection.dp,
    )
    return replace(rows, fields=rows.fields | {SELECTED: selected.float().cpu()})
