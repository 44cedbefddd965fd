"""Steps that survive an interruption: from its advantages on, a step can be saved and resumed in its updates."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megappo.batch.exchange import Batch
from megappo.observe.metrics import reduce_ranks
from megappo.trainer.component_batch import ComponentBatch
from megappo.trainer.experience import AdvantageResult
from megappo.trainer.in_flight import InFlight, LocalUpdate
from megappo.trainer.run import Run
from megappo.trainer.statistics import training_metrics


def resume_step(run: Run) -> InFlight | None:
    """Return the step that the run was interrupted in, with its rows at the models; None if there is none."""
    flight = run.progress.in_flight
    if flight is not None:
        with run.phase("scatter"):
            run.engines.sleep()  # the first sync has woken them
            flight.resume(run.models.scatter(flight.batch))
    return flight


def begin_updates(
    run: Run,
    step: int,
    batch: Batch,
    shards: Mapping[str, ComponentBatch],
    metrics: Mapping[str, Any],
    result: AdvantageResult,
) -> InFlight:
    """Check that the engines sampled as the actor would, and keep the rows with their advantages for a checkpoint."""
    checked = run.engines.check_rollouts(result.log_prob_diff)
    metrics = {**metrics, **checked, **result.metrics}
    flight = InFlight(step, replace(batch, rows=result.rows), metrics, result.kl_penalty, shards)
    run.progress.begin(flight, run.batches.num_drawn)
    return flight


def end_updates(run: Run, flight: InFlight) -> dict[str, Any]:
    """Return the step's metrics so far, with those of the updates on all ranks. All ranks wait for the slowest here.

    Raises:
        Interrupted: the updates were interrupted.
    """
    local = {}
    for name in run.models.trained_in(flight.step):
        shard, seconds = flight.shards[name], run.phase.seconds(f"update_{name}")
        local[name] = LocalUpdate(shard.num_updates, shard.interrupted, shard.optimizer_steps, seconds)
    updates, memory = zip(*run.exchange.share((local, run.phase.memory())), strict=True)
    if flight.add(updates):
        run.check_interrupted()
    metrics = flight.metrics | reduce_ranks(memory)
    for name in local:
        metrics |= training_metrics(flight.optimizer_steps[name], name)
        metrics[f"{name}/mfu"] = run.utilisation.mfu(flight.shards[name], [update[name] for update in updates])
    return metrics
