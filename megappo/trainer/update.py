"""The updates of a step: PPO's epochs over the mini-batches of the rows at a component.

They begin with rows that have the fields of the loss (see `placement.components.Training`), and wait for no rank of
another component.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from megappo import platform
from megappo.batch.rows import Rows
from megappo.config.schema import Actor, Config
from megappo.interruption import INTERRUPTION
from megappo.models.train_engine import OptimizerStep, TrainedEngine
from megappo.trainer.component import Scattered
from megappo.trainer.objectives import SELECTED, ActorLoss, critic_loss

Steps = list[OptimizerStep]
"""On the component's output ranks; [] elsewhere."""


def update_actor(scattered: Scattered, config: Config) -> Steps:
    """Train the actor; the rest of the step is skipped once its KL to the old policy passes actor.target_kl."""
    engine = scattered.component.engine
    if not isinstance(engine, TrainedEngine):
        return []
    actor = config.actor
    steps: Steps = []
    for rows, *counts in _mini_batches(scattered, engine, actor.ppo_epochs):
        loss = ActorLoss(config, *counts)
        if actor.method.select is not None:
            rows = _with_selection(engine, rows, actor.method.select, actor)
        steps.append(engine.train_batch(rows, loss))
        if actor.target_kl is not None and engine.total(loss.policy_kl) > actor.target_kl:
            scattered.num_updates = actor.ppo_epochs * len(scattered.split)
            break
    return steps if engine.is_output else []


def update_critic(scattered: Scattered, config: Config) -> Steps:
    """Train the critic."""
    engine = scattered.component.engine
    if not isinstance(engine, TrainedEngine):
        return []
    mini_batches = _mini_batches(scattered, engine, config.critic.ppo_epochs)
    steps = [engine.train_batch(rows, critic_loss(config, *counts)) for rows, *counts in mini_batches]
    return steps if engine.is_output else []


def _mini_batches(scattered: Scattered, engine: TrainedEngine, ppo_epochs: int) -> Iterator[tuple[Rows, int, int]]:
    """As `Scattered.mini_batches`, epoch after epoch: those that are left, until the run is to be interrupted."""
    parts = scattered.mini_batches()
    while scattered.num_updates < ppo_epochs * len(parts):
        scattered.interrupted = engine.anywhere(bool(INTERRUPTION.reason))
        if scattered.interrupted:
            return
        scattered.num_updates += 1
        yield parts[(scattered.num_updates - 1) % len(parts)]


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
