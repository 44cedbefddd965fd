"""A model and the rows scattered to it: the same calls on every rank, whether the component lives there or not.

What exchanges rows, all ranks do together; what computes waits for no rank of another component, so that components on
different ranks compute at once.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megappo.batch.balance import balanced_partitions
from megappo.batch.exchange import Exchange, RankRows, RowTable, empty_rows, output_sources, shard_destinations
from megappo.batch.rows import Rows
from megappo.batch.step_batch import Batch
from megappo.models.train_engine import MegatronEngine, Outputs
from megappo.placement.layout import Layout

MiniBatches = tuple[RankRows, ...]
"""How a component splits a step's rows: `[i][shard]` are the row numbers of mini-batch i."""


def split(table: RowTable, layout: Layout, num_mini_batches: int) -> MiniBatches:
    """Mini-batches of consecutive prompts (their order is random already), each spread over the shards by tokens."""
    lengths = table.total_lengths()
    mini_batches = []
    for rows in table.split(num_mini_batches):
        parts = balanced_partitions([lengths[row] for row in rows], layout.data)
        mini_batches.append(tuple(tuple(rows[i] for i in part) for part in parts))
    return tuple(mini_batches)


def shards_of(mini_batches: MiniBatches) -> RankRows:
    """All rows of each data-parallel shard, mini-batch after mini-batch."""
    return tuple(tuple(row for part in parts for row in part) for parts in zip(*mini_batches, strict=True))


class Component:
    """A model on the ranks of its layout; on other ranks a null object that only joins exchanges.

    Args:
        engine: this rank's part of the model, None where the component is absent.
    """

    def __init__(self, name: str, layout: Layout, engine: MegatronEngine | None, exchange: Exchange):
        self.name = name
        self.layout = layout
        self.engine = engine
        self.exchange = exchange

    def scatter(self, batch: Batch, num_mini_batches: int = 1, others: Iterable["Scattered"] = ()) -> "Scattered":
        """Bring a step's rows, tokens and mask only, to the component's shards; `others` have some already."""
        mini_batches = split(batch.table, self.layout, num_mini_batches)
        destinations = shard_destinations(self.layout, shards_of(mini_batches), self.exchange.world_size)
        there = next((one.rows for one in others if one.destinations == destinations), None)
        if there is None:
            there = self.exchange.move(batch.rows, batch.table, batch.owners, destinations, ["response_mask"])
        return Scattered(self, batch, mini_batches, destinations, there)


@dataclass
class Scattered:
    """A step's rows at a component's shards. Every rank calls every method, in the same order.

    Attributes:
        step: of PPO; 0 until there are fields to train on.
        num_updates: mini-batches of all epochs that the component has been trained on.
        num_resumed: of these, those before the run was interrupted.
        interrupted: the rest of them was left for when the run goes on.
    """

    component: Component
    batch: Batch
    split: MiniBatches
    destinations: RankRows
    rows: Rows
    step: int = 0
    num_updates: int = 0
    num_resumed: int = 0
    interrupted: bool = False

    def passed_to(self, component: Component) -> "Scattered":
        """The same rows at another component of the same layout: they are there already."""
        return replace(self, component=component)

    def forward(self) -> Outputs:
        """The head's outputs for the rows here; {} but on the component's last stages. Waits for no other component.

        Raises:
            FloatingPointError: one of the outputs is not finite.
        """
        engine = self.component.engine
        outputs = engine.forward(self.rows) if engine else {}
        _check_finite(self.component.name, outputs)
        return outputs

    def gather(self, outputs: Outputs, owned: Rows, names: Mapping[str, str]) -> Rows:
        """`owned` with the outputs of `forward` added: `names` maps an output to the field that it becomes."""
        return gather([(self, outputs, names)], owned)

    def scatter_fields(self, owned: Rows, names: Sequence[str]) -> None:
        """Bring fields of the owned rows to the scattered ones."""
        scatter_fields([(self, names)], owned)

    def mini_batches(self, *, counts_empty_rows: bool = False) -> list[tuple[Rows, int, int]]:
        """This rank's rows of each mini-batch, with the tokens of mask 1 and the rows, of all shards.

        Args:
            counts_empty_rows: count rows without a token of mask 1, too.
        """
        shard = self.component.layout.shard_of(self.component.exchange.rank)
        parts = []
        start = 0
        for shards in self.split:
            lengths = self.batch.table.policy_lengths[[row for part in shards for row in part]]
            size = len(shards[shard]) if shard is not None else 0
            num_rows = len(lengths) if counts_empty_rows else int((lengths > 0).sum())
            parts.append((self.rows.select(range(start, start + size)), int(lengths.sum()), num_rows))
            start += size
        return parts


def gather(found: Iterable[tuple[Scattered, Outputs, Mapping[str, str]]], owned: Rows) -> Rows:
    """As `Scattered.gather`, of several at once."""
    parts = []
    for at, outputs, names in found:
        sources = output_sources(at.component.layout, shards_of(at.split), at.component.exchange.world_size)
        is_here = at.component.engine is not None and at.component.engine.is_output
        fields = {field: outputs[output] for output, field in names.items() if is_here}
        rows = at.rows if is_here else empty_rows((), at.batch.table)
        parts.append((replace(rows, fields=fields), sources, list(names.values())))
    return at.component.exchange.move_fields(parts, owned, at.batch.table, at.batch.owners) if parts else owned


def scatter_fields(wanted: Iterable[tuple[Scattered, Sequence[str]]], owned: Rows) -> None:
    """Bring to scattered rows their fields of the owned ones: at once to those that are on the same ranks."""
    alike = defaultdict(list)
    for at, names in wanted:
        alike[at.destinations].append((at, names))
    for destinations, found in alike.items():
        at, _ = found[0]
        union = list(dict.fromkeys(name for _, names in found for name in names))
        source = (owned, at.batch.owners, union)
        moved = at.component.exchange.move_fields([source], at.rows, at.batch.table, destinations).fields
        for at, names in found:
            at.rows = replace(at.rows, fields=at.rows.fields | {name: moved[name] for name in names})


def _check_finite(component: str, outputs: Outputs) -> None:
    """Outputs are 0 where the mask is, so every number counts. What other ranks wait for then never comes."""
    for name, output in outputs.items():
        broken = output[~output.isfinite()]
        if len(broken):
            raise FloatingPointError(
                f"the {component}'s {name} are not finite: {len(broken)} of {output.numel()} numbers, the first "
                f"{broken[0]}: its weights hold NaN or infinity, or have run away. Look at the model that it was "
                "loaded from; if it was trained since, lower optim.lr"
            )
