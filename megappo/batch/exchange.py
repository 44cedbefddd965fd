"""Row exchange between ranks: each row goes only where it is needed, and only its own tokens travel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megappo.batch.fields import field_of
from megappo.batch.positions import taken
from megappo.batch.rows import NO_TOKENS, Rows, is_response
from megappo.errors import ActionableError
from megappo.placement.layout import Layout

RankRows = tuple[tuple[int, ...], ...]
"""Row numbers at each world rank, in the order in which the rank keeps them."""
Part = tuple[Tensor, Tensor]
"""Numbers to send, int32, of one row after the other, and how many each row of the table has, [B] int64."""


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

    def total_lengths(self) -> list[int]:
        """Return the prompt + response tokens of each row."""
        return (self.prompt_lengths + self.response_lengths).tolist()

    def split(self, size: int) -> RankRows:
        """Split all rows into `size` parts of consecutive prompts, as evenly as they divide, each with all its rows."""
        counts = self.prompt_ids.unique_consecutive(return_counts=True)[1]
        ends = [0, *counts.cumsum(0).tolist()]
        bounds = [ends[len(counts) * part // size] for part in range(size + 1)]
        return tuple(tuple(range(start, stop)) for start, stop in pairwise(bounds))


def shard_destinations(layout: Layout, shards: Sequence[Sequence[int]], world_size: int) -> RankRows:
    """Return the rows each world rank needs when data-parallel shard i of a component works on rows `shards[i]`."""
    needed: list[tuple[int, ...]] = [()] * world_size
    for shard, rows in enumerate(shards):
        for rank in layout.shard_ranks(shard):
            needed[rank] = tuple(rows)
    return tuple(needed)


def output_sources(layout: Layout, shards: Sequence[Sequence[int]], world_size: int) -> RankRows:
    """Return the rows whose outputs each world rank has: each shard's rows on its output rank alone."""
    held: list[tuple[int, ...]] = [()] * world_size
    for shard, rows in enumerate(shards):
        held[layout.output_rank(shard)] = tuple(rows)
    return tuple(held)


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

    def table(self, rows: Rows) -> tuple[Rows, RowTable, RankRows]:
        """Number this rank's rows; all ranks together. See `numbered`."""
        return self.numbered(rows, self.share(entries_of(rows)))

    def numbered(self, rows: Rows, entries: Sequence[np.ndarray]) -> tuple[Rows, RowTable, RankRows]:
        """Number rows over all ranks: prompt after prompt, the rows of a prompt by their previous ids.

        Args:
            entries: `entries_of` of every rank.

        Returns:
            The rows with their numbers as ids, the table of all rows, and the rows at each rank.

        Raises:
            ValueError: two rows of a prompt have the same id.
        """
        every = np.concatenate(entries)
        order = np.lexsort((every[:, 1], every[:, 0]))
        ordered = every[order]
        is_repeated = (ordered[1:, :2] == ordered[:-1, :2]).all(axis=1)
        if is_repeated.any():
            repeated = list(map(tuple, ordered[1:, :2][is_repeated][:10].tolist()))
            raise ValueError(f"each row must be there once; found several times, by prompt_id and id: {repeated}")
        numbers = np.empty(len(order), np.int64)
        numbers[order] = np.arange(len(order))
        ends = np.cumsum([len(of_rank) for of_rank in entries])
        sources = tuple(tuple(part.tolist()) for part in np.split(numbers, ends[:-1]))
        prompt_ids, _, *lengths = torch.from_numpy(ordered).long().unbind(dim=1)
        rows = replace(rows, ids=torch.tensor(sources[self.rank], dtype=torch.int64))
        return rows, RowTable(prompt_ids, *lengths), sources

    def move(
        self, rows: Rows, table: RowTable, sources: RankRows, destinations: RankRows, names: Sequence[str]
    ) -> Rows:
        """Return rows `destinations[rank]` with their tokens and the named fields.

        Args:
            rows: this rank's rows, in the order of `sources[rank]`.
            sources: each row once. destinations: each row on any number of ranks.
            names: fields to move, the same on every rank. A field with several columns must be in `rows` even where
                there are no rows.

        Raises:
            ValueError: `rows` are not those of `sources`.
        """
        route = self._route(rows, sources, destinations)
        lengths = table.prompt_lengths + table.response_lengths
        tokens = taken(rows.input_ids, rows.lengths, route.positions).to("cpu", torch.int32)
        parts = [(tokens, lengths), *(_part(rows, name, table, route) for name in names)]
        arrived, *fields = self._all_to_all(route, parts)
        input_ids = taken(arrived.long(), lengths[torch.cat(route.arriving)], route.places)
        moved = replace(empty_rows(destinations[self.rank], table), input_ids=input_ids)
        return _with_fields(moved, rows, names, fields, table, route)

    def move_fields(
        self, found: Sequence[tuple[Rows, RankRows, Sequence[str]]], into: Rows, table: RowTable, destinations: RankRows
    ) -> Rows:
        """Add fields of other ranks' rows to `into`, the rows `destinations[rank]` that this rank already has.

        Args:
            found: (rows here, their `sources`, names of fields to move), each as in `move`.

        Raises:
            ValueError: as in `move`.
        """
        for rows, sources, names in found:
            route = self._route(rows, sources, destinations)
            fields = self._all_to_all(route, [_part(rows, name, table, route) for name in names])
            into = _with_fields(into, rows, names, fields, table, route)
        return into

    def _route(self, rows: Rows, sources: RankRows, destinations: RankRows) -> "_RowRoute":
        if rows.ids.tolist() != list(sources[self.rank]):
            raise ValueError(f"expected rows {sources[self.rank]} here, in this order; found {rows.ids.tolist()}")
        return _RowRoute.of(self.rank, sources, destinations)

    def _all_to_all(self, route: "_RowRoute", parts: Sequence[Part]) -> list[Tensor]:
        """Send the parts of the outgoing rows in one collective; return the parts of the arriving rows."""
        if not parts:
            return []
        to_ranks = [_sizes(sizes, route.outgoing) for _, sizes in parts]
        from_ranks = [_sizes(sizes, route.arriving) for _, sizes in parts]
        outgoing = [numbers.split(sizes) for (numbers, _), sizes in zip(parts, to_ranks, strict=True)]
        sent = torch.cat([numbers for of_rank in zip(*outgoing, strict=True) for numbers in of_rank])
        num_sent = [sum(of_rank) for of_rank in zip(*to_ranks, strict=True)]
        num_received = [sum(of_rank) for of_rank in zip(*from_ranks, strict=True)]
        received = sent.new_empty(sum(num_received))
        dist.all_to_all_single(received, sent, num_received, num_sent, group=self.group)
        arrived = received.split([size for of_rank in zip(*from_ranks, strict=True) for size in of_rank])
        return [torch.cat(arrived[number :: len(parts)]) for number in range(len(parts))]


def entries_of(rows: Rows) -> np.ndarray:
    """Return what every rank must know of the rows to number them, [b, 5] int32.

    The columns are prompt_ids, ids, and the lengths of prompts, responses and the tokens the policy wrote.
    """
    policy_lengths = rows.response_mask.sum(dim=1).long()
    columns = (rows.prompt_ids, rows.ids, rows.prompt_lengths, rows.response_lengths, policy_lengths)
    return torch.stack(columns, dim=1).int().numpy()


def _part(rows: Rows, name: str, table: RowTable, route: "_RowRoute") -> Part:
    """Return a field's numbers of the rows to send, as int32 with the same bits."""
    field = field_of(name)
    if len(rows) or field.has_columns:
        values = rows.field(name).to("cpu", torch.float32)[route.positions]
    else:  # a rank without rows need not have the field
        values = torch.zeros(0, 0) if field.per_token else torch.zeros(0)
    if field.per_token:
        flat = values[is_response(rows.response_lengths[route.positions], values.shape[1])]
        return flat.view(torch.int32), table.response_lengths
    num_columns = values.shape[1] if field.has_columns else 1
    return values.flatten().view(torch.int32), torch.full((len(table),), num_columns)


def _with_fields(
    into: Rows, sent: Rows, names: Sequence[str], arrived: Sequence[Tensor], table: RowTable, route: "_RowRoute"
) -> Rows:
    """Add fields to `into` from the numbers that arrived; `sent` are the rows that were here."""
    fields = dict(into.fields)
    mask = is_response(table.response_lengths[torch.cat(route.arriving)], table.max_response_length)
    for name, numbers in zip(names, arrived, strict=True):
        values = numbers.view(torch.float32)
        if field_of(name).per_token:
            values = torch.zeros(mask.shape).masked_scatter_(mask, values)
        elif field_of(name).has_columns:
            values = values.view(len(mask), sent.fields[name].shape[1])
        fields[name] = values[route.places]
    return replace(into, fields=fields)


@dataclass(frozen=True)
class _RowRoute:
    """Rows that one rank sends to each rank and receives from each, in the order in which they travel; all int64.

    Attributes:
        outgoing, arriving: row numbers, by rank.
        positions: of the outgoing rows, one rank after the other, among the rows here.
        places: of the rows needed here among the arriving ones, one rank after the other.
    """

    outgoing: tuple[Tensor, ...]
    arriving: tuple[Tensor, ...]
    positions: Tensor
    places: Tensor

    @classmethod
    @lru_cache(maxsize=8)  # a step has few routes, some of them several times
    def of(cls, rank: int, sources: RankRows, destinations: RankRows) -> "_RowRoute":
        held = [set(rows) for rows in sources]
        outgoing = [_tensor([row for row in needed if row in held[rank]]) for needed in destinations]
        arriving = [_tensor([row for row in destinations[rank] if row in rows]) for rows in held]
        places = torch.empty(sum(map(len, sources)), dtype=torch.int64)
        places[_tensor(sources[rank])] = torch.arange(len(sources[rank]))
        positions = places[torch.cat(outgoing)]
        places[torch.cat(arriving)] = torch.arange(len(destinations[rank]))
        return cls(tuple(outgoing), tuple(arriving), positions, places[_tensor(destinations[rank])])


def _tensor(rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def _sizes(sizes: Tensor, rows_of_ranks: Sequence[Tensor]) -> list[int]:
    """Sum the sizes of the rows of each rank."""
    return [int(sizes[rows].sum()) for rows in rows_of_ranks]
