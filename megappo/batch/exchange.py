"""Row exchange between ranks: each row goes only where it is needed, and only its own tokens travel."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.batch.fields import field_of
from megappo.batch.rows import NO_TOKENS, Rows, is_within, padded, taken
from megappo.errors import ActionableError
from megappo.placement.layout import Layout

K = TypeVar("K")
V = TypeVar("V")
RankRows = tuple[tuple[int, ...], ...]
"""Row numbers at each world rank, in the order in which the rank keeps them."""


class OtherRankError(ActionableError, RuntimeError):
    """Another rank failed, so this one cannot continue."""

    is_consequence = True


@dataclass(frozen=True)
class RowTable:
    """Every rank's knowledge of a step's rows: [B] int64 each, by row number. Lengths are in tokens.

    Attributes:
        prompt_ids: see `Rows`; ascending.
        policy_lengths: response tokens with mask 1, which the policy wrote.
    """

    prompt_ids: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    policy_lengths: Tensor

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def max_response_length(self) -> int:
        """The padded width R of response-token fields, the same on every rank."""
        return int(self.response_lengths.max()) if len(self) else 0

    @property
    def lengths(self) -> Tensor:
        """Prompt + response tokens of each row, [B] int64."""
        return self.prompt_lengths + self.response_lengths

    def split(self, size: int) -> RankRows:
        """Split all rows into `size` parts of consecutive prompts, as evenly as they divide, each with all its rows."""
        _, counts = self.prompt_ids.unique_consecutive(return_counts=True)
        ends = [0, *counts.cumsum(0).tolist()]
        bounds = [ends[len(counts) * part // size] for part in range(size + 1)]
        return tuple(tuple(range(start, stop)) for start, stop in pairwise(bounds))


@dataclass(frozen=True)
class Batch:
    """A step's rows at the ranks that hold them, and what every rank knows about all of them.

    Attributes:
        rows: this rank's rows.
        owners: the rows at each rank; after `Exchange.number` each is on one.
    """

    rows: Rows
    table: RowTable
    owners: RankRows

    def at_rank_0(self, exchange: "Exchange") -> Rows:
        """Gather all rows with all fields on rank 0, none elsewhere; all ranks together."""
        destinations = (tuple(range(len(self.table))), *[()] * (exchange.world_size - 1))
        return exchange.move(self, destinations, list(self.rows.fields)).rows


def shard_destinations(layout: Layout, shards: Sequence[Sequence[int]], world_size: int) -> RankRows:
    """Return the rows each world rank needs when data-parallel shard i of a component works on rows `shards[i]`."""
    needed: dict[int, tuple[int, ...]] = {}
    for shard, rows in enumerate(shards):
        needed |= dict.fromkeys(layout.shard_ranks(shard), tuple(rows))
    return tuple(needed.get(rank, ()) for rank in range(world_size))


def output_sources(layout: Layout, shards: Sequence[Sequence[int]], world_size: int) -> RankRows:
    """Return the rows whose outputs each world rank has: each shard's rows on its output rank alone."""
    held = {layout.output_rank(shard): tuple(rows) for shard, rows in enumerate(shards)}
    return tuple(held.get(rank, ()) for rank in range(world_size))


def empty_rows(ids: Sequence[int], table: RowTable) -> Rows:
    """Return rows with their lengths, without tokens or fields yet."""
    index = torch.tensor(list(ids), dtype=torch.int64)
    return Rows(index, table.prompt_ids[index], table.prompt_lengths[index], table.response_lengths[index], NO_TOKENS)


class Exchange:
    """Row exchange over one CPU group of all ranks. Every rank must call every method, in the same order.

    Args:
        group: process group over the whole world whose backend moves CPU tensors (gloo).
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_gather(self, value: object) -> list:
        """Return every rank's value, on every rank. For small values: lengths, metrics, errors."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def merge(self, own: Mapping[K, V]) -> dict[K, V]:
        """Return the entries of every rank's mapping, on every rank; of a key that several have, the last rank's."""
        merged: dict[K, V] = {}
        for of_rank in self.all_gather(dict(own)):
            merged |= of_rank
        return merged

    def raise_together(self, error: BaseException | None) -> None:
        """Raise on every rank when any rank has an error, so that none waits for one that left."""
        messages = self.all_gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise OtherRankError(f"rank {rank} failed: {message}")

    def on_rank_0(self, action: Callable[[], Any]) -> Any:
        """Run an action on rank 0 and return its result on every rank; raise on every rank if it fails."""
        error = None
        result = None
        if self.rank == 0:
            try:
                result = action()
            except Exception as failure:
                error = failure
        self.raise_together(error)
        return self.all_gather(result)[0]

    def number(self, rows: Rows) -> Batch:
        """Number the rows of all ranks together: prompt after prompt, the rows of a prompt by their previous ids, which
        are replaced by the numbers.

        Raises:
            ValueError: two rows of a prompt have the same id.
        """
        policy_lengths = rows.response_mask.sum(dim=1).long()
        columns = (rows.prompt_ids, rows.ids, rows.prompt_lengths, rows.response_lengths, policy_lengths)
        by_rank = self.all_gather(torch.stack(columns, dim=1).int())
        every = torch.cat(by_rank).long()
        keys = every[:, 0] * 2**32 + every[:, 1]
        order = keys.argsort()
        repeated = order[1:][keys[order].diff() == 0]
        if len(repeated):
            found = every[repeated, :2].tolist()
            raise ValueError(f"each row must be there once; found several times, by prompt_id and id: {found}")
        numbers = order.argsort().split([len(of_rank) for of_rank in by_rank])
        owners = tuple(tuple(of_rank.tolist()) for of_rank in numbers)
        prompt_ids, _, *lengths = every[order].unbind(dim=1)
        return Batch(replace(rows, ids=numbers[self.rank]), RowTable(prompt_ids, *lengths), owners)

    def move(self, batch: Batch, destinations: RankRows, names: Sequence[str]) -> Batch:
        """Return rows `destinations[rank]` with their tokens and the named fields.

        Args:
            batch: each row on one rank.
            destinations: each row on any number of ranks.
            names: fields to move, the same on every rank. A field with columns or bytes must be in the batch's rows
                even where there are none.

        Raises:
            ValueError: the rows differ from `batch.owners`.
        """
        tokens = self._all_to_all(batch, destinations, batch.rows.input_ids.to("cpu", torch.int32), batch.table.lengths)
        moved = replace(empty_rows(destinations[self.rank], batch.table), input_ids=tokens.long())
        return self.move_fields(batch, names, Batch(moved, batch.table, destinations))

    def move_fields(self, batch: Batch, names: Sequence[str], into: Batch) -> Batch:
        """Return `into` with fields of other ranks' rows added.

        Args:
            batch, names: rows of the same step, each on one rank, and fields to move, as in `move`.

        Raises:
            ValueError: as in `move`.
        """
        fields = dict(into.rows.fields)
        for name in names:
            fields[name] = self._moved_field(batch, name, into)
        return replace(into, rows=replace(into.rows, fields=fields))

    def _moved_field(self, batch: Batch, name: str, into: Batch) -> Tensor:
        field = field_of(name)
        rows = batch.rows
        table = batch.table
        if field.has_bytes:
            return self._all_to_all(batch, into.owners, rows.field(name), table.lengths)
        values = torch.zeros(0, 0)
        if len(rows) or field.has_columns:  # a rank without rows need not have the other fields
            values = rows.field(name).to("cpu", torch.float32)
        if field.per_token:
            numbers = values[is_within(rows.response_lengths, values.shape[1])]
            arrived = self._all_to_all(batch, into.owners, numbers, table.response_lengths)
            return padded(arrived, into.rows.response_lengths, table.max_response_length)
        columns = values.shape[1] if field.has_columns else 1
        arrived = self._all_to_all(batch, into.owners, values.flatten(), torch.full((len(table),), columns))
        return arrived.reshape(len(into.rows), columns) if field.has_columns else arrived

    def _all_to_all(
        self,
        batch: Batch,
        destinations: RankRows,
        numbers: Tensor,
        lengths: Tensor,
    ) -> Tensor:
        """Send numbers of the rows here; return the numbers of the rows `destinations[rank]`.

        Args:
            numbers: numbers of each row of `batch.rows`, end to end, [n] or [n, K].
            lengths: [B] int64, how many each row of the table has.
        """
        held = list(batch.owners[self.rank])
        needed = list(destinations[self.rank])
        found = batch.rows.ids.tolist()
        if found != held:
            raise ValueError(f"expected rows {held} here, in this order; found {found}")

        owners: dict[int, int] = {}
        for rank, rows in enumerate(batch.owners):
            owners |= dict.fromkeys(rows, rank)

        sent = []
        num_sent = []
        for wanted in destinations:
            mine = [row for row in wanted if owners[row] == self.rank]
            sent += mine
            num_sent.append(int(lengths[mine].sum()))

        arrived = []
        num_received = []
        for rank in range(self.world_size):
            theirs = [row for row in needed if owners[row] == rank]
            arrived += theirs
            num_received.append(int(lengths[theirs].sum()))

        outgoing = taken(numbers, lengths[held], _places(held, sent))
        received = outgoing.new_empty(sum(num_received), *outgoing.shape[1:])
        dist.all_to_all_single(received, outgoing, num_received, num_sent, group=self.group)
        return taken(received, lengths[arrived], _places(arrived, needed))


def _places(ids: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """Return the position in `ids` of each wanted row."""
    places = {row: place for place, row in enumerate(ids)}
    return torch.tensor([places[row] for row in wanted], dtype=torch.int64)
