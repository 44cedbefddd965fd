"""A step between its advantages and its end: what a checkpoint needs of it so that its updates can go on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megappo.batch.exchange import Exchange
from megappo.batch.files import RowsFile, write_rows
from megappo.models.train_engine import OptimizerStep
from megappo.observe.metrics import Histogram, Metric, reduce_ranks
from megappo.trainer.component import Batch, Scattered
from megappo.trainer.statistics import steps_of_ranks

IN_FLIGHT = "in_flight.safetensors"
OfSteps = list[dict[str, Metric]]


@dataclass(frozen=True)
class Update:
    """What a component did, on all of its ranks: optimizer steps, in so many seconds of the slowest."""

    num_steps: int
    seconds: float


@dataclass
class InFlight:
    """A step whose rows have their advantages. The same on every rank, but for the rows.

    Attributes:
        batch: at its owners, with all fields that losses read.
        metrics: of the step so far.
        kl_penalty: see `experience.Judged`.
        num_updates: component -> mini-batches of all epochs that it has been trained on.
        num_mini_batches: component -> those of an epoch.
        optimizer_steps: component -> metrics of its optimizer steps.
    """

    step: int
    batch: Batch
    metrics: dict[str, Any]
    kl_penalty: float | None
    num_mini_batches: dict[str, int] = field(default_factory=dict)
    num_updates: dict[str, int] = field(default_factory=dict)
    optimizer_steps: dict[str, OfSteps] = field(default_factory=dict)

    def resume(self, scattered: Mapping[str, Scattered]) -> None:
        """Have the components go on where they were interrupted."""
        for name, at in scattered.items():
            at.num_updates = at.num_resumed = self.num_updates.get(name, 0)

    def add(
        self,
        scattered: Mapping[str, Scattered],
        steps: Mapping[str, list[OptimizerStep]],
        seconds: Mapping[str, float],
        memory: Mapping[str, Metric],
        exchange: Exchange,
    ) -> tuple[bool, dict[str, Update], dict[str, float]]:
        """Take what the components have been trained on; whether any was interrupted, their updates, and the memory
        over all ranks, which goes along. All ranks together.

        Args:
            steps: of the components that are trained in this step: see `Models.update`.
            seconds: that these took on this rank.
            memory: this rank's part of it.
        """
        positions = {name: (scattered[name].num_updates, scattered[name].interrupted) for name in steps}
        of_ranks = exchange.share((positions, steps, seconds, memory))
        positions_of, steps_of, seconds_of, memory_of = zip(*of_ranks, strict=True)
        for name in steps:
            self.num_mini_batches[name] = len(scattered[name].split)
            self.num_updates[name] = max(found[name][0] for found in positions_of)
            of_component = steps_of_ranks([found[name] for found in steps_of], name)
            self.optimizer_steps.setdefault(name, []).extend(of_component)
        interrupted = any(interrupted for found in positions_of for _, interrupted in found.values())
        updates = {
            name: Update(max(len(found[name]) for found in steps_of), max(found[name] for found in seconds_of))
            for name in steps
        }
        return interrupted, updates, reduce_ranks(memory_of)


def write_in_flight(folder: Path, flight: InFlight, exchange: Exchange) -> None:
    """Write it into a checkpoint; all ranks together, of which rank 0 writes.

    Raises:
        OSError, OtherRankError: it cannot be written.
    """
    rows = flight.batch.at_rank_0(exchange)
    facts = asdict(replace(flight, batch=None, metrics={}, optimizer_steps={}))
    facts["metrics"] = {name: _plain(value) for name, value in flight.metrics.items()}
    facts["optimizer_steps"] = {
        name: [{key: (one.reduction, one.part) for key, one in step.items()} for step in steps]
        for name, steps in flight.optimizer_steps.items()
    }
    exchange.on_rank_0(lambda: write_rows(folder / IN_FLIGHT, rows, facts))


def read_in_flight(folder: Path, exchange: Exchange) -> InFlight | None:
    """The step that a checkpoint has begun; None if it has none. Every rank reads its own rows.

    Raises:
        RowsFileError: the file is damaged.
    """
    path = folder / IN_FLIGHT
    if not path.exists():
        return None
    with RowsFile(path) as file:
        facts = dict(file.facts)
        batch = Batch.read(file, exchange)
    facts["metrics"] = {name: _value(value) for name, value in facts["metrics"].items()}
    facts["optimizer_steps"] = {name: _metrics(steps) for name, steps in facts["optimizer_steps"].items()}
    return InFlight(**(facts | {"batch": batch}))


def _plain(value: Any) -> Any:
    """A metric's value as JSON has it."""
    return list(value.numbers) if isinstance(value, Histogram) else value


def _value(value: Any) -> Any:
    return Histogram(tuple(value)) if isinstance(value, list) else value


def _metrics(steps: Sequence[Mapping[str, tuple[str, Any]]]) -> OfSteps:
    """Versions before wrote a part of one number without its list."""
    return [
        {
            name: Metric(tuple(part) if isinstance(part, list) else (part,), reduction)
            for name, (reduction, part) in step.items()
        }
        for step in steps
    ]
