"""Row exchange between ranks: each row goes only where it is needed, and only its own tokens travel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from megappo.batch.fields import field_of
from megappo.batch.rows import NO_TOKENS, Rows, is_within, padded
from megappo.errors import ActionableError
from megappo.placement.layout import Layout

RankRows = tuple[tuple[int, ...], ...]
"""Row numbers at each world rank, in the order in which the rank keeps them."""
Part = tuple[Tensor, Tensor]
"""Numbers of each row here, [b, width] int32, and how many of them each row of the table has, [B] int64."""


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
        counts = self.prompt_ids.unique_consecutive(return_counts=True)[1]
        ends = [0, *counts.cumsum(0).tolist()]
        bounds = [ends[len(counts) * part // size] for part in range(size + 1)]
        return tuple(tuple(range(start, stop)) for start, stop in pairwise(bounds))


@dataclass(frozen=True)
class Batch:
    """A step's rows at the ranks that hold them, and what every rank knows about all of them.

    Attributes:
        rows: those of this rank.
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
    needed = {}
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

    def share(self, value: object) -> list:
        """Return every rank's value, on every rank. For small values: lengths, metrics, errors."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def raise_together(self, error: BaseException | None) -> None:
        """Raise on every rank when any rank has an error, so that none waits for one that left."""
        messages = self.share(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise OtherRankError(f"rank {rank} failed: {message}")

    def on_rank_0(self, action: Callable[[], Any]) -> Any:
        """Run an action on rank 0 and return its result on every rank; raise on every rank if it fails."""
        error, result = None, None
        if self.rank == 0:
            try:
                result = action()
            except Exception as failure:
                error = failure
        self.raise_together(error)
        return self.share(result)[0]

    def number(self, rows: Rows) -> Batch:
        """Number the rows of all ranks together: prompt after prompt, the rows of a prompt by their previous ids, which
        are replaced by the numbers.

        Raises:
            ValueError: two rows of a prompt have the same id.
        """
        policy_lengths = rows.response_mask.sum(dim=1).long()
        columns = (rows.prompt_ids, rows.ids, rows.prompt_lengths, rows.response_lengths, policy_lengths)
        by_rank = self.share(torch.stack(columns, dim=1).int())
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
            names: fields to move, the same on every rank. A field with several columns must be in the batch's rows even
                where there are none.

        Raises:
            ValueError: the rows are not those of `batch.owners`.
        """
        rows, table = batch.rows, batch.table
        longest = max(table.lengths.tolist(), default=0)
        tokens = padded(rows.input_ids.to("cpu", torch.int32), rows.lengths, longest)
        parts = [(tokens, table.lengths), *(_field_part(rows, name, table) for name in names)]
        arrived, *fields = self._all_to_all(batch, destinations, parts)
        moved = empty_rows(destinations[self.rank], table)
        input_ids = arrived[is_within(moved.lengths, longest)].long()
        return Batch(_with_fields(replace(moved, input_ids=input_ids), names, fields), table, destinations)

    def move_fields(self, batch: Batch, names: Sequence[str], into: Batch) -> Batch:
        """Return `into` with fields of other ranks' rows added.

        Args:
            batch, names: rows of the same step, each on one rank, and fields to move, as in `move`.

        Raises:
            ValueError: as in `move`.
        """
        parts = [_field_part(batch.rows, name, batch.table) for name in names]
        return replace(into, rows=_with_fields(into.rows, names, self._all_to_all(batch, into.owners, parts)))

    def _all_to_all(self, batch: Batch, destinations: RankRows, parts: Sequence[Part]) -> Sequence[Tensor]:
        """Send the parts of the rows here in one collective; return those of the rows `destinations[rank]`.

        Returns:
            Of each part [rows, width] int32, 0 beyond the numbers that a row has.
        """
        held, needed = batch.owners[self.rank], destinations[self.rank]
        if batch.rows.ids.tolist() != list(held):
            raise ValueError(f"expected rows {held} here, in this order; found {batch.rows.ids.tolist()}")
        if not parts:
            return []
        owners = {row: rank for rank, of_rank in enumerate(batch.owners) for row in of_rank}
        outgoing = [[row for row in of_rank if owners[row] == self.rank] for of_rank in destinations]
        arriving = [[row for row in needed if owners[row] == rank] for rank in range(self.world_size)]
        widths = [numbers.shape[1] for numbers, _ in parts]
        values = torch.cat([numbers for numbers, _ in parts], dim=1)
        sent_ids, arrived_ids = list(chain(*outgoing)), list(chain(*arriving))
        sent = values[_places(held, sent_ids)][_mask(parts, sent_ids)]
        sizes = torch.stack([lengths for _, lengths in parts]).sum(dim=0)
        num_sent, num_received = _totals(sizes, outgoing), _totals(sizes, arriving)
        received = sent.new_empty(sum(num_received))
        dist.all_to_all_single(received, sent, num_received, num_sent, group=self.group)
        mask = _mask(parts, arrived_ids)
        arrived = values.new_zeros(mask.shape).masked_scatter_(mask, received)
        return arrived[_places(arrived_ids, needed)].split(widths, dim=1)


def _field_part(rows: Rows, name: str, table: RowTable) -> Part:
    """Return a field's numbers, as int32 with the same bits."""
    field = field_of(name)
    is_missing = not len(rows) and not field.has_columns  # a rank without rows need not have the field
    values = torch.zeros(0) if is_missing else rows.field(name).to("cpu", torch.float32)
    if field.per_token:
        width, lengths = table.max_response_length, table.response_lengths
    else:
        width = values.shape[1] if field.has_columns else 1
        lengths = torch.full((len(table),), width)
    values = values.new_zeros(0, width) if not len(rows) else values.reshape(len(rows), -1)
    return pad(values, (0, width - values.shape[1])).view(torch.int32), lengths  # rows may be padded to another width


def _with_fields(rows: Rows, names: Sequence[str], arrived: Sequence[Tensor]) -> Rows:
    """Return the rows with the fields that arrived for them."""
    fields = dict(rows.fields)
    for name, numbers in zip(names, arrived, strict=True):
        values = numbers.contiguous().view(torch.float32)
        has_width = field_of(name).per_token or field_of(name).has_columns
        fields[name] = values if has_width else values[:, 0]
    return replace(rows, fields=fields)


def _mask(parts: Sequence[Part], ids: Sequence[int]) -> Tensor:
    """Return the numbers of these rows that travel, of all parts side by side, [rows, widths] bool."""
    masks = [is_within(lengths[list(ids)], numbers.shape[1]) for numbers, lengths in parts]
    return torch.cat(masks, dim=1)


def _places(ids: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return the position in `ids` of each wanted row."""
    places = {row: place for place, row in enumerate(ids)}
    return [places[row] for row in wanted]


def _totals(sizes: Tensor, rows_of_ranks: Sequence[list[int]]) -> list[int]:
    """Sum the sizes of the rows of each rank."""
    return [int(sizes[rows].sum()) for rows in rows_of_ranks]
