"""A step between its advantages and its end: what a checkpoint needs of it so that its updates can go on."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from megappo.batch.exchange import Exchange
from megappo.batch.files import RowsFile, write_rows
from megappo.batch.step_batch import Batch
from megappo.models.train_engine import OptimizerStep
from megappo.observe.metrics import Histogram, Metric
from megappo.trainer.component import Scattered
from megappo.trainer.statistics import steps_of_ranks

IN_FLIGHT = "in_flight.safetensors"
OfSteps = list[dict[str, Metric]]


@dataclass(frozen=True)
class Update:
    """What a component did, on all of its ranks: optimizer steps, in so many seconds of the slowest."""

    num_steps: int
    seconds: float


class UpdateHere(NamedTuple):
    """What a component did on one rank.

    Attributes:
        num_updates: mini-batches of all epochs of the step that it has been trained on.
        interrupted: whether there are more, but the run is to end.
        steps, seconds: of the optimizer, and of the clock, since the step was begun or resumed.
    """

    num_updates: int
    interrupted: bool
    steps: list[OptimizerStep]
    seconds: float

    @classmethod
    def of(cls, scattered: Scattered, steps: list[OptimizerStep], seconds: float) -> "UpdateHere":
        """Of the component whose rows these are."""
        return cls(scattered.num_updates, scattered.interrupted, steps, seconds)


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
        self, scattered: Mapping[str, Scattered], of_ranks: Sequence[Mapping[str, UpdateHere]]
    ) -> tuple[bool, dict[str, Update]]:
        """Take what the components have been trained on, on all ranks; whether any was interrupted, and their updates.

        Args:
            of_ranks: by name of the components that are trained in this step.
        """
        updates = {}
        for name in of_ranks[0]:
            found = [of_rank[name] for of_rank in of_ranks]
            self.num_mini_batches[name] = len(scattered[name].split)
            self.num_updates[name] = max(one.num_updates for one in found)
            self.optimizer_steps.setdefault(name, []).extend(steps_of_ranks([one.steps for one in found], name))
            updates[name] = Update(max(len(one.steps) for one in found), max(one.seconds for one in found))
        return any(one.interrupted for of_rank in of_ranks for one in of_rank.values()), updates


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
