"""Moving rows of the batch between ranks: each row goes only where it is needed, and only its own tokens travel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megappo.batch.fields import field_of
from megappo.batch.rows import Rows
from megappo.placement.layout import Layout

RankRows = tuple[tuple[int, ...], ...]
"""Row numbers at each world rank, now or to be, in the order in which the rank keeps them."""


LOST_RANK = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
"""How a collective says that another rank has ended."""


class OtherRankError(RuntimeError):
    """Another rank failed, so this one cannot go on."""


@dataclass(frozen=True)
class RowTable:
    """What every rank knows of a step's rows: [B] int64 each, by row number. Lengths are in tokens.

    Attributes:
        prompt_ids: see `Rows`; none is less than the one before.
        policy_lengths: response tokens with mask 1: those the policy wrote.
    """

    prompt_ids: torch.Tensor
    prompt_lengths: torch.Tensor
    response_lengths: torch.Tensor
    policy_lengths: torch.Tensor

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def max_response_length(self) -> int:
        """The padded width R of response-token fields, the same on every rank."""
        return int(self.response_lengths.max()) if len(self) else 0

    def total_lengths(self) -> list[int]:
        """Prompt + response tokens of each row."""
        return (self.prompt_lengths + self.response_lengths).tolist()

    def split(self, size: int) -> RankRows:
        """All rows in `size` parts: consecutive prompts, as evenly as they divide, each with all of its rows."""
        counts = self.prompt_ids.unique_consecutive(return_counts=True)[1]
        ends = [0, *counts.cumsum(0).tolist()]
        bounds = [ends[len(counts) * part // size] for part in range(size + 1)]
        return tuple(tuple(range(start, stop)) for start, stop in zip(bounds, bounds[1:], strict=False))


def shard_destinations(layout: Layout, shards: Sequence[Sequence[int]], world_size: int) -> RankRows:
    """Rows wanted at each world rank when data-parallel shard i of a component works on rows `shards[i]`."""
    wanted: list[tuple[int, ...]] = [()] * world_size
    for shard, rows in enumerate(shards):
        for rank in layout.shard_ranks(shard):
            wanted[rank] = tuple(rows)
    return tuple(wanted)


def output_sources(layout: Layout, shards: Sequence[Sequence[int]], world_size: int) -> RankRows:
    """Where a component's results are: each shard's rows on its output rank alone."""
    held: list[tuple[int, ...]] = [()] * world_size
    for shard, rows in enumerate(shards):
        held[layout.output_rank(shard)] = tuple(rows)
    return tuple(held)


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
        """Every rank's value, on every rank. For small things: lengths, metrics, errors."""
        values: list = [None] * self.world_size
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
        """Run on rank 0; every rank waits for it, gets what it returns, and raises when it failed."""
        error, result = None, None
        if self.rank == 0:
            try:
                result = action()
            except Exception as failure:
                error = failure
        self.raise_together(error)
        return self.share(result)[0]

    def table(self, rows: Rows) -> tuple[Rows, RowTable, RankRows]:
        """The rows with their numbers over all ranks, what is known of all of them, and where they are.

        Rows are numbered prompt after prompt, those of a prompt by the ids that they had.

        Raises:
            ValueError: two rows of a prompt have the same id.
        """
        policy_lengths = rows.response_mask.sum(dim=1).long()
        columns = (rows.prompt_ids, rows.ids, rows.prompt_lengths, rows.response_lengths, policy_lengths)
        shared = self.share(list(zip(*(column.tolist() for column in columns), strict=True)))
        entries = sorted(entry for part in shared for entry in part)
        names = [entry[:2] for entry in entries]
        twice = [name for name, following in zip(names, names[1:], strict=False) if name == following]
        if twice:
            raise ValueError(f"each row must be there once; found several times, by prompt_id and id: {twice[:10]}")
        numbers = {name: number for number, name in enumerate(names)}
        sources = tuple(tuple(numbers[entry[:2]] for entry in part) for part in shared)
        prompt_ids, _, *lengths = torch.tensor(entries, dtype=torch.int64).reshape(-1, len(columns)).unbind(dim=1)
        rows = replace(rows, ids=torch.tensor(sources[self.rank], dtype=torch.int64))
        return rows, RowTable(prompt_ids, *lengths), sources

    def move(
        self,
        rows: Rows,
        table: RowTable,
        sources: RankRows,
        destinations: RankRows,
        names: Sequence[str],
    ) -> Rows:
        """Rows `destinations[rank]` with their tokens and the named fields.

        Args:
            rows: the rows here, in the order of `sources[rank]`.
            sources: each row once. destinations: each row on any number of ranks.
            names: fields to move, the same on every rank; of several columns: in `rows` even where these are none.
        """
        moved = empty_rows(destinations[self.rank], table)
        lengths = table.total_lengths()
        sent = {int(row): tokens for row, tokens in zip(rows.ids, rows.input_ids, strict=True)}
        received = self._move_ragged(sent, lengths, sources, destinations, torch.int64)
        moved = replace(moved, input_ids=[received[row] for row in destinations[self.rank]])
        return self.move_fields(rows, moved, table, sources, destinations, names)

    def move_fields(
        self,
        rows: Rows,
        into: Rows,
        table: RowTable,
        sources: RankRows,
        destinations: RankRows,
        names: Sequence[str],
    ) -> Rows:
        """`into`, the rows `destinations[rank]` this rank already has, with the named fields of `rows` added."""
        moved = {name: self._move_field(rows, name, table, sources, destinations) for name in names}
        return replace(into, fields=into.fields | moved)

    def _move_field(
        self, rows: Rows, name: str, table: RowTable, sources: RankRows, destinations: RankRows
    ) -> torch.Tensor:
        kind = field_of(name)
        width = table.max_response_length if kind.per_token else rows.field(name).shape[1] if kind.has_columns else 1
        lengths = table.response_lengths.tolist() if kind.per_token else [width] * len(table)
        sent = {row: rows.field(name)[i].reshape(-1)[: lengths[row]] for i, row in enumerate(rows.ids.tolist())}
        received = self._move_ragged(sent, lengths, sources, destinations, torch.float32)
        mine = destinations[self.rank]
        field = torch.zeros(len(mine), width)
        for i, row in enumerate(mine):
            field[i, : lengths[row]] = received[row]
        return field if kind.per_token or kind.has_columns else field[:, 0]

    def _move_ragged(
        self,
        sent: dict[int, torch.Tensor],
        lengths: list[int],
        sources: RankRows,
        destinations: RankRows,
        dtype: torch.dtype,
    ) -> dict[int, torch.Tensor]:
        """All-to-all of one ragged value per row: row number -> its `lengths[row]` elements."""
        mine = set(sources[self.rank])
        outgoing = [[row for row in destination if row in mine] for destination in destinations]
        source_of = {row: rank for rank, held in enumerate(sources) for row in held}
        incoming: list[list[int]] = [[] for _ in range(self.world_size)]
        for row in destinations[self.rank]:
            incoming[source_of[row]].append(row)
        parts = [sent[row].to(dtype=dtype, device="cpu") for rows in outgoing for row in rows]
        send = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
        sizes = [sum(lengths[row] for row in rows) for rows in incoming]
        receive = torch.empty(sum(sizes), dtype=dtype)
        send_sizes = [sum(lengths[row] for row in rows) for rows in outgoing]
        dist.all_to_all_single(receive, send, sizes, send_sizes, group=self.group)
        order = [row for rows in incoming for row in rows]
        return dict(zip(order, receive.split([lengths[row] for row in order]), strict=True))


def empty_rows(ids: Sequence[int], table: RowTable) -> Rows:
    """Rows with their lengths, without tokens or fields yet."""
    index = torch.tensor(list(ids), dtype=torch.int64)
    return Rows(index, table.prompt_ids[index], table.prompt_lengths[index], table.response_lengths[index], [], {})
