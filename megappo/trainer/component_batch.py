"""A model and a step's rows at it: the same calls on every rank, whether the model lives there or not.

All ranks exchange rows together. Forward passes and updates wait for no rank of another component, so components on
different ranks compute at the same time.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch

from megappo.batch.balance import balanced_partitions, partition_groups
from megappo.batch.exchange import Batch, Exchange, RankRows, RowTable, empty_rows, output_sources, shard_destinations
from megappo.batch.rows import Rows
from megappo.models.megatron_engine import MegatronEngine, Outputs
from megappo.models.offload import NO_OFFLOAD, Offload
from megappo.models.train_engine import OptimizerStep
from megappo.placement.components import ComponentSpec
from megappo.placement.layout import Layout

OF_IMAGES = ("prompt_records",)
"""Fields by which every pass finds the images of rows that may have any."""
MiniBatches = tuple[RankRows, ...]
"""A step's rows as a component splits them: `[i][shard]` are the row numbers of mini-batch i."""


def split(
    table: RowTable,
    layout: Layout,
    num_mini_batches: int,
    *,
    keeps_prompts: bool = False,
    chosen: Collection[int] | None = None,
) -> MiniBatches:
    """Return mini-batches of consecutive prompts, whose order is random, each balanced over the shards by tokens.

    Args:
        keeps_prompts: all rows of a prompt go to the same shard.
        chosen: numbers of the rows to split; None = all.
    """
    lengths = table.lengths.tolist()
    keys = (table.prompt_ids if keeps_prompts else torch.arange(len(table))).tolist()
    mini_batches = []
    for every_row in table.split(num_mini_batches):
        rows = every_row if chosen is None else [row for row in every_row if row in chosen]
        shares = partial(balanced_partitions, k=layout.data)
        parts = partition_groups([lengths[row] for row in rows], [keys[row] for row in rows], shares)
        mini_batches.append(tuple(tuple(rows[i] for i in part) for part in parts))
    return tuple(mini_batches)


def shards_of(mini_batches: MiniBatches) -> RankRows:
    """Return all rows of each data-parallel shard, mini-batch after mini-batch."""
    return tuple(tuple(row for part in parts for row in part) for parts in zip(*mini_batches, strict=True))


@dataclass
class Component:
    """A model on the ranks of its layout; on other ranks a null object that only joins exchanges.

    Attributes:
        engine: this rank's part of the model; None on ranks without the model.
        offload: the tensors of the engine that may sleep.
    """

    name: str
    spec: ComponentSpec
    layout: Layout
    exchange: Exchange
    engine: MegatronEngine | None = None
    offload: Offload = NO_OFFLOAD

    def scatter(
        self,
        batch: Batch,
        num_mini_batches: int = 1,
        others: Iterable["ComponentBatch"] = (),
    ) -> "ComponentBatch":
        """Bring a step's tokens, and what the component reads with them, to its shards; `others` may have the same rows
        already. A teacher gets its own rows, in one mini-batch."""
        taught = None
        if self.spec.teacher is not None:
            taught = batch = self._taught(batch.rows)
            num_mini_batches = 1
        divide = partial(split, batch.table, self.layout, num_mini_batches, keeps_prompts=self.spec.scores_pairs)
        mini_batches = trained = divide()
        if self.spec.members > 1:
            own = self._trained(batch)
            trained = divide(chosen=own)
            mini_batches = tuple(map(_joined, trained, divide(chosen={*range(len(batch.table))} - own)))
        destinations = shard_destinations(self.layout, shards_of(mini_batches), self.exchange.world_size)
        for other in others:
            if other.taught is taught is None and other.batch.owners == destinations:
                return ComponentBatch(self, mini_batches, trained, other.batch)
        reads = [*self.spec.reads, *(name for name in OF_IMAGES if name in batch.rows.fields)]
        return ComponentBatch(self, mini_batches, trained, self.exchange.move(batch, destinations, reads), taught)

    def _taught(self, rows: Rows) -> Batch:
        """Return the rows here that the component teaches, and others if it is fewer than a row for each shard: all
        shards make a pass together."""
        is_chosen = rows.field("teacher") == self.spec.teacher
        if sum(self.exchange.all_gather(int(is_chosen.sum()))) < self.layout.data:
            is_chosen |= rows.ids < self.layout.data
        return self.exchange.number(rows.select(is_chosen.nonzero().flatten()))

    def _trained(self, batch: Batch) -> frozenset[int]:
        """Return the numbers of the rows on all ranks that the critic of an ensemble trains on."""
        rows = batch.rows
        numbers = rows.ids
        if "episodes" in rows.fields:  # whose rows are one response
            episodes = rows.fields["episodes"].long()
            most = max(self.exchange.all_gather(max([0, *episodes.tolist()])))
            _, prompts = batch.table.prompt_ids.unique(return_inverse=True)
            numbers = prompts[rows.ids] * (most + 1) + episodes
        own = rows.ids[numbers % self.spec.members == self.spec.member].tolist()
        return frozenset(chain.from_iterable(self.exchange.all_gather(own)))


@dataclass
class ComponentBatch:
    """A step's rows at a component's shards. Every rank calls every method, in the same order.

    Attributes:
        trained: rows of `split` that the component trains on: the first of each mini-batch's at each shard.
        batch: the rows at the component's ranks.
        taught: the rows at their owners, numbered by themselves, if a teacher reads them alone.
        step: PPO step; 0 until there are fields to train on.
        num_updates: mini-batches of all epochs that the component has been trained on.
        optimizer_steps: steps of this process, on the component's output ranks.
        outputs: outputs of the last update on the component's output ranks, where the run reads them.
    """

    component: Component
    split: MiniBatches
    trained: MiniBatches
    batch: Batch
    taught: Batch | None = None
    step: int = 0
    num_updates: int = 0
    optimizer_steps: list[OptimizerStep] = field(default_factory=list)
    outputs: Outputs = field(default_factory=dict)

    def forward(self) -> Outputs:
        """Return the head's outputs for the rows here; {} except on the component's last stages.

        Raises:
            FloatingPointError: an output is not finite.
        """
        engine = self.component.engine
        outputs = engine.forward(self.batch.rows) if engine else {}
        for name, output in outputs.items():  # 0 where the mask is 0, so every number counts
            broken = output[~output.isfinite()]
            if len(broken):
                raise FloatingPointError(
                    f"the {self.component.name}'s {name} are not finite: {len(broken)} of {output.numel()} numbers, "
                    f"the first is {broken[0]}: its weights hold NaN or infinity, or have diverged. Check the model "
                    "that it was loaded from; if it has been trained since, lower optim.lr"
                )
        return outputs

    def gather(self, outputs: Outputs, fields: Mapping[str, str], owned: Batch) -> Batch:
        """Return `owned` with the component's outputs for these rows; if they are not all, the fields of others stay.

        Args:
            fields: output -> the field that it becomes.
        """
        component = self.component
        table = self.batch.table
        sources = output_sources(component.layout, shards_of(self.split), component.exchange.world_size)
        rows = empty_rows((), table)
        if component.engine is not None and component.engine.is_output:
            rows = replace(self.batch.rows, fields={field: outputs[output] for output, field in fields.items()})
        outputs_here, names = Batch(rows, table, sources), list(fields.values())
        if self.taught is None:
            return component.exchange.move_fields(outputs_here, names, owned)
        is_own, is_counted = (one.rows.field("teacher") == component.spec.teacher for one in (owned, self.taught))
        into = replace(self.taught, rows=replace(self.taught.rows, fields={}))  # others are as wide as the step's rows
        moved = component.exchange.move_fields(outputs_here, names, into).rows
        merged = dict(owned.rows.fields)
        for name in names:
            merged[name] = merged.get(name, torch.zeros(len(is_own), owned.table.max_response_length)).clone()
            merged[name][is_own, : table.max_response_length] = moved.fields[name][is_counted]
        return replace(owned, rows=replace(owned.rows, fields=merged))

    def scatter_fields(self, owned: Batch, names: Sequence[str]) -> None:
        """Bring fields of the owned rows to these rows."""
        self.batch = self.component.exchange.move_fields(owned, names, self.batch)

    def mini_batches(self, *, counts_empty_rows: bool = False) -> list[tuple[Rows, int, int]]:
        """Return this rank's rows of each mini-batch, with the number of tokens with mask 1 and of rows of all shards.

        Args:
            counts_empty_rows: count rows without a token of mask 1, too.
        """
        shard = self.component.layout.shard_of(self.component.exchange.rank)
        parts = []
        start = 0
        for shards, trained in zip(self.split, self.trained, strict=True):
            lengths = self.batch.table.policy_lengths[[row for part in trained for row in part]]
            size, held = (0 if shard is None else len(parts[shard]) for parts in (trained, shards))
            num_rows = len(lengths) if counts_empty_rows else int((lengths > 0).sum())
            parts.append((self.batch.rows.select(range(start, start + size)), int(lengths.sum()), num_rows))
            start += held
        return parts


def _joined(first: RankRows, then: RankRows) -> RankRows:
    """Join the rows of a mini-batch at each shard. A shard without any of one gets some of the other."""
    return tuple(part + other for part, other in zip(first, reversed(then), strict=True))
