"""The updates of a step: PPO's epochs over the mini-batches of the rows at a component.

They begin with rows that have the fields of the loss (see `placement.components.Training`), and wait for no rank of
another component.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megappo.batch.exchange import OtherRankError
from megappo.batch.files import write_rows
from megappo.batch.rows import Rows
from megappo.config.schema import Actor, Config
from megappo.models.train_engine import ELSEWHERE, LossFn, OptimizerStep, TrainedEngine
from megappo.observe.metrics import Metric
from megappo.runtime import platform
from megappo.runtime.interruption import INTERRUPTION
from megappo.trainer.component import Scattered
from megappo.trainer.objectives import SELECTED, ActorLoss, conventions, critic_loss
from megappo.trainer.statistics import NOT_KEPT

Steps = list[OptimizerStep]
"""On the component's output ranks; [] elsewhere."""


def update_actor(scattered: Scattered, config: Config) -> Steps:
    """Train the actor; the rest of the step is skipped once its KL to the old policy passes actor.target_kl."""
    engine = scattered.component.engine
    if not isinstance(engine, TrainedEngine):
        return []
    actor = config.actor
    steps: Steps = []
    for rows, *counts in _mini_batches(scattered, engine, actor.ppo_epochs, config):
        loss = ActorLoss(config, *counts)
        if actor.method.select is not None:
            rows = _with_selection(engine, rows, actor.method.select, actor)
        steps.append(_trained(scattered, engine, rows, loss, config))
        if actor.target_kl is not None and engine.total(loss.policy_kl) > actor.target_kl:
            scattered.num_updates = actor.ppo_epochs * len(scattered.split)
            break
    return steps if engine.is_output else []


def update_critic(scattered: Scattered, config: Config) -> Steps:
    """Train the critic."""
    engine = scattered.component.engine
    if not isinstance(engine, TrainedEngine):
        return []
    mini_batches = _mini_batches(scattered, engine, config.critic.ppo_epochs, config)
    losses = ((rows, critic_loss(config, *counts)) for rows, *counts in mini_batches)
    steps = [_trained(scattered, engine, rows, loss, config) for rows, loss in losses]
    return steps if engine.is_output else []


def _mini_batches(
    scattered: Scattered, engine: TrainedEngine, ppo_epochs: int, config: Config
) -> Iterator[tuple[Rows, int, int]]:
    """As `Scattered.mini_batches`, epoch after epoch: those that are left, until the run is to be interrupted."""
    parts = scattered.mini_batches(counts_empty_rows=conventions(config).counts_empty_rows)
    while scattered.num_updates < ppo_epochs * len(parts):
        scattered.interrupted = engine.anywhere(bool(INTERRUPTION.reason))
        if scattered.interrupted:
            return
        scattered.num_updates += 1
        yield parts[(scattered.num_updates - 1) % len(parts)]


def _trained(scattered: Scattered, engine: TrainedEngine, rows: Rows, loss: LossFn, config: Config) -> OptimizerStep:
    """One optimizer step. Of one that is skipped the rows are kept for study.

    Raises:
        FloatingPointError, OtherRankError: trainer.max_bad_steps have been skipped before it, one after the other.
    """
    step = engine.train_batch(rows, loss)
    if not step.skipped:
        engine.skipped_in_a_row = 0
        return step
    engine.skipped_in_a_row += 1
    rank, limit = scattered.component.exchange.rank, config.trainer.max_bad_steps
    kept, metrics = _kept_for_study(scattered, rows, step.skipped, config) if engine.is_output else ("", {})
    if engine.skipped_in_a_row > limit:
        if step.skipped == ELSEWHERE:
            raise OtherRankError(ELSEWHERE)
        in_a_row = f" ({engine.skipped_in_a_row} times in a row, trainer.max_bad_steps is {limit})" if limit else ""
        raise FloatingPointError(
            f"{step.skipped}{in_a_row}; no weight was changed by it. Look at the rewards, advantages and log-probs of "
            f"the last steps in metrics.jsonl; if they run away, lower optim.lr{kept}"
        )
    if step.skipped != ELSEWHERE or metrics:
        who = f"the {scattered.component.name}'s update {scattered.num_updates} of step {scattered.step}"
        print(f"WARNING (rank {rank}): {step.skipped}: {who} is skipped{kept}", flush=True)
    return replace(step, metrics=metrics)


def _kept_for_study(scattered: Scattered, rows: Rows, reason: str, config: Config) -> tuple[str, dict[str, Metric]]:
    """Write the rows of a skipped update, as far as they are here, and say where, or why not, which is counted."""
    name, rank = scattered.component.name, scattered.component.exchange.rank
    file = f"step_{scattered.step:08d}_{name}_{scattered.num_updates:04d}_rank_{rank}.safetensors"
    path = Path(config.trainer.output_dir, "bad_steps", file)
    facts = {"step": scattered.step, "weights_step": scattered.step - 1, "model": config.model.path, "reason": reason}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, rows, facts)
    except OSError as error:
        return f"; its rows cannot be kept: {error}", {f"{name}/{NOT_KEPT}": Metric((1.0,), "sum")}
    return f"; its rows are in {path}", {}


def _with_selection(engine: TrainedEngine, rows: Rows, select: Callable[..., torch.Tensor], actor: Actor) -> Rows:
    """The rows with the tokens that the loss treats apart. Choosing them takes the whole mini-batch's log-probs as they
    are now, so a forward pass more, and makes the choice independent of how the mini-batch is cut."""
    outputs = engine.forward(rows)
    if not outputs:  # not the last stage: no loss here
        return rows
    device = platform.device()
    chosen = select(
        outputs["log_probs"].to(device),
        rows.fields["advantages"].to(device),
        rows.response_mask.to(device),
        actor,
        group=engine.groups.collection.dp,
    )
    return replace(rows, fields=rows.fields | {SELECTED: chosen.float().cpu()})
