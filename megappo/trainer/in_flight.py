"""A step between its advantages and its end, and the part of it that a checkpoint needs to resume its updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megappo.batch.exchange import Batch, Exchange
from megappo.batch.rows_file import RowsFile, write_rows
from megappo.models.train_engine import OptimizerStep
from megappo.observe.metrics import Histogram, Metric
from megappo.trainer.component_batch import ComponentBatch
from megappo.trainer.statistics import merge_optimizer_steps

IN_FLIGHT = "in_flight.safetensors"


class LocalUpdate(NamedTuple):
    """Update of one component on one rank.

    Attributes:
        num_updates: mini-batches of all epochs of the step that the component has been trained on.
        interrupted: mini-batches remain, as the run is to stop.
        steps, seconds: optimizer steps and time since the update began or was resumed.
    """

    num_updates: int
    interrupted: bool
    steps: list[OptimizerStep]
    seconds: float


@dataclass
class InFlight:
    """A step whose rows have their advantages. The same on every rank, except for the rows.

    Attributes:
        batch: rows at their owners, with all fields that losses read.
        metrics: of the step until its advantages.
        kl_penalty: see `experience.AdvantageResult`.
        shards: component -> its rows. Not saved.
        num_mini_batches: component -> mini-batches of an epoch.
        num_updates: component -> mini-batches of all epochs that it has been trained on.
        optimizer_steps: component -> metrics of its optimizer steps.
    """

    step: int
    batch: Batch
    metrics: dict[str, Any]
    kl_penalty: float | None
    shards: Mapping[str, ComponentBatch] = field(default_factory=dict)
    num_mini_batches: dict[str, int] = field(default_factory=dict)
    num_updates: dict[str, int] = field(default_factory=dict)
    optimizer_steps: dict[str, list[dict[str, Metric]]] = field(default_factory=dict)

    def resume(self, shards: Mapping[str, ComponentBatch]) -> None:
        """Continue the updates of these rows where they were interrupted."""
        self.shards = shards
        for name, shard in shards.items():
            shard.num_updates = shard.num_resumed = self.num_updates.get(name, 0)

    def add(self, updates: Sequence[Mapping[str, LocalUpdate]]) -> bool:
        """Add the updates of all ranks, by component; return whether any was interrupted."""
        for name in updates[0]:
            found = [update[name] for update in updates]
            self.num_mini_batches[name] = len(self.shards[name].split)
            self.num_updates[name] = max(one.num_updates for one in found)
            steps = merge_optimizer_steps([one.steps for one in found], name)
            self.optimizer_steps.setdefault(name, []).extend(steps)
        return any(one.interrupted for update in updates for one in update.values())


def write_in_flight(folder: Path, flight: InFlight, exchange: Exchange) -> None:
    """Write a step into a checkpoint. All ranks call together; rank 0 writes.

    Raises:
        OSError, OtherRankError: it cannot be written.
    """
    rows = flight.batch.at_rank_0(exchange)
    facts = {
        "step": flight.step,
        "metrics": {name: _to_json(value) for name, value in flight.metrics.items()},
        "kl_penalty": flight.kl_penalty,
        "num_mini_batches": flight.num_mini_batches,
        "num_updates": flight.num_updates,
        "optimizer_steps": flight.optimizer_steps,
    }
    exchange.on_rank_0(lambda: write_rows(folder / IN_FLIGHT, rows, facts))


def read_in_flight(folder: Path, exchange: Exchange) -> InFlight | None:
    """Return the step that a checkpoint was saved in the middle of; None if there is none. Every rank reads its own
    rows.

    Raises:
        RowsFileError: the file is damaged.
    """
    path = folder / IN_FLIGHT
    if not path.exists():
        return None
    with RowsFile(path) as file:
        facts = file.facts
        batch = file.batch(exchange)
    return InFlight(
        step=facts["step"],
        batch=batch,
        metrics={name: _from_json(value) for name, value in facts["metrics"].items()},
        kl_penalty=facts["kl_penalty"],
        num_mini_batches=facts["num_mini_batches"],
        num_updates=facts["num_updates"],
        optimizer_steps={name: list(map(_metrics, steps)) for name, steps in facts["optimizer_steps"].items()},
    )


def _to_json(value: Any) -> Any:
    return list(value.numbers) if isinstance(value, Histogram) else value


def _from_json(value: Any) -> Any:
    return Histogram(tuple(value)) if isinstance(value, list) else value


def _metrics(step: Mapping[str, tuple[Sequence[float], str]]) -> dict[str, Metric]:
    return {name: Metric(tuple(part), reduction) for name, (part, reduction) in step.items()}
