"""Updates of a step: PPO's epochs over the mini-batches of the rows at a component.

The rows already hold every field that the loss reads (see `placement.components.Training`). An update waits for no rank
of another component.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megappo.batch.exchange import OtherRankError
from megappo.batch.rows import Rows
from megappo.batch.rows_file import write_rows
from megappo.config.schema import Actor, Config
from megappo.models.train_engine import ELSEWHERE, LossFn, TrainedEngine
from megappo.runtime import platform
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.interruption import INTERRUPTION
from megappo.trainer.component_batch import ComponentBatch
from megappo.trainer.objectives import SELECTED, ActorLoss, conventions, critic_loss, positive_mask


def update_actor(batch: ComponentBatch, config: Config) -> None:
    """Train the actor; stop once its KL to the policy before the step exceeds actor.target_kl."""
    engine = batch.component.engine
    actor = config.actor
    if not isinstance(engine, TrainedEngine):
        return
    for rows, num_tokens, num_rows in _mini_batches(batch, engine, actor.ppo_epochs, config):
        num_positive_tokens = 0
        if actor.positive_nll_coef:
            num_positive_tokens = int(engine.total(float(positive_mask(rows).sum())))
        loss = ActorLoss(config, num_tokens, num_rows, num_positive_tokens)
        if actor.method.select is not None:
            rows = _with_selection(engine, rows, actor.method.select, actor)
        _optimizer_step(batch, engine, rows, loss, config)
        if loss.old_log_probs:
            batch.outputs = {"log_probs": torch.stack([loss.old_log_probs[row] for row in rows.ids.tolist()]).cpu()}
        if actor.target_kl is not None and engine.total(loss.policy_kl) > actor.target_kl:
            batch.num_updates = actor.ppo_epochs * len(batch.split)


def update_critic(batch: ComponentBatch, config: Config) -> None:
    """Train a critic."""
    forward = batch.component.spec.forward
    old = forward.fields["values"] if forward else "values"
    update(batch, config, config.critic.ppo_epochs, partial(critic_loss, config, name=batch.component.name, old=old))


def update(
    batch: ComponentBatch,
    config: Config,
    epochs: int,
    loss_of: Callable[[int, int], LossFn],
) -> None:
    """Train a component.

    Args:
        epochs: passes over the rows.
        loss_of: returns the loss of a mini-batch, by its number of tokens with mask 1 and its number of rows.
    """
    engine = batch.component.engine
    if not isinstance(engine, TrainedEngine):
        return
    for rows, num_tokens, num_rows in _mini_batches(batch, engine, epochs, config):
        _optimizer_step(batch, engine, rows, loss_of(num_tokens, num_rows), config)


def _mini_batches(
    batch: ComponentBatch,
    engine: TrainedEngine,
    ppo_epochs: int,
    config: Config,
) -> Iterator[tuple[Rows, int, int]]:
    """Yield the remaining `ComponentBatch.mini_batches`, epoch after epoch, until the run is interrupted."""
    parts = batch.mini_batches(counts_empty_rows=conventions(config).counts_empty_rows)
    total = ppo_epochs * len(parts)
    while batch.num_updates < total and not engine.anywhere(bool(INTERRUPTION.reason)):
        position = batch.num_updates % len(parts)
        batch.num_updates += 1
        heartbeat.begin(f"mini-batch {batch.num_updates} of {total}")
        yield parts[position]


def _optimizer_step(
    batch: ComponentBatch,
    engine: TrainedEngine,
    rows: Rows,
    loss: LossFn,
    config: Config,
) -> None:
    """Make one optimizer step.

    Raises:
        FloatingPointError, OtherRankError: it and the trainer.max_bad_steps steps before it were skipped.
    """
    step = engine.train_batch(rows, loss)
    engine.skipped_in_a_row = engine.skipped_in_a_row + 1 if step.skipped else 0
    if step.skipped:
        _report_skipped(batch, engine, rows, step.skipped, config)
    if engine.is_output:
        batch.optimizer_steps.append(step)


def _report_skipped(
    batch: ComponentBatch,
    engine: TrainedEngine,
    rows: Rows,
    reason: str,
    config: Config,
) -> None:
    """Warn about a skipped optimizer step, and raise if too many were skipped in a row. The rows are kept."""
    rank = batch.component.exchange.rank
    limit = config.trainer.max_bad_steps
    which = f"the {batch.component.name}'s update {batch.num_updates} of step {batch.step}"
    kept = _keep_rows(batch, rows, reason, config) if engine.is_output else ""
    if engine.skipped_in_a_row <= limit:
        if reason != ELSEWHERE:
            print(f"WARNING (rank {rank}): {reason}: {which} is skipped{kept}", flush=True)
        return
    if reason == ELSEWHERE:
        raise OtherRankError(ELSEWHERE)
    raise FloatingPointError(
        f"{reason} ({engine.skipped_in_a_row} times in a row, trainer.max_bad_steps is {limit}); no weight was changed "
        "by it. Check the rewards, advantages and log-probs of the last steps in metrics.jsonl; if they diverge, lower "
        f"optim.lr{kept}"
    )


def _keep_rows(batch: ComponentBatch, rows: Rows, reason: str, config: Config) -> str:
    """Write this rank's rows of a skipped step; return where they are. Warn if they cannot be written."""
    name = batch.component.name
    rank = batch.component.exchange.rank
    file = f"step_{batch.step:08d}_{name}_{batch.num_updates:04d}_rank_{rank}.safetensors"
    path = Path(config.trainer.output_dir, "bad_steps", file)
    facts = {
        "step": batch.step,
        "weights_step": batch.step - 1,
        "model": config.model.path,
        "reason": reason,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, rows, facts)
    except OSError as error:
        print(f"WARNING (rank {rank}): cannot keep the rows of a skipped step: {error}", flush=True)
        return ""
    return f"; its rows are in {path}"


def _with_selection(
    engine: TrainedEngine,
    rows: Rows,
    select: Callable[..., torch.Tensor],
    actor: Actor,
) -> Rows:
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
