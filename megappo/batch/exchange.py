"""Moving rows of the batch between ranks: each row goes only where it is needed, and only its own tokens travel."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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


HEAD_BYTES = 256
"""Of a value that is shared, to go with its length: most have no more, and then one collective is all."""
LENGTH_BYTES = 8


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
        mine = pickle.dumps(value)
        length = len(mine).to_bytes(LENGTH_BYTES, "little")
        heads = self._all_gather(length + mine[:HEAD_BYTES], LENGTH_BYTES + HEAD_BYTES)
        lengths = [int.from_bytes(head[:LENGTH_BYTES], "little") for head in heads]
        rests = self._all_gather(mine[HEAD_BYTES:], max(lengths) - HEAD_BYTES)
        parts = zip(heads, rests, lengths, strict=True)
        return [pickle.loads((head[LENGTH_BYTES:] + rest)[:length]) for head, rest, length in parts]

    def _all_gather(self, mine: bytes, size: int) -> list[bytes]:
        """Every rank's bytes, filled up to `size`, which is the same on every rank."""
        if size <= 0:
            return [b""] * self.world_size
        sent = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.world_size)]
        dist.all_gather(received, sent, group=self.group)
        return [part.numpy().tobytes() for part in received]

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

        Raises:
            ValueError: other rows are here than `sources` says.
        """
        route = self._route(rows, sources, destinations)
        lengths = table.prompt_lengths + table.response_lengths
        sent = [rows.input_ids[i].to("cpu", torch.int64) for i in route.outgoing.tolist()]
        flat = torch.cat(sent) if sent else torch.empty(0, dtype=torch.int64)
        received = self._all_to_all(flat, route, lengths).split(lengths[route.arriving].tolist())
        moved = empty_rows(destinations[self.rank], table)
        moved = replace(moved, input_ids=[received[i] for i in route.places.tolist()])
        return self._add_fields(rows, moved, table, route, names)

    def move_fields(
        self,
        rows: Rows,
        into: Rows,
        table: RowTable,
        sources: RankRows,
        destinations: RankRows,
        names: Sequence[str],
    ) -> Rows:
        """`into`, the rows `destinations[rank]` this rank already has, with the named fields of `rows` added.

        Args and Raises: as `move`.
        """
        return self._add_fields(rows, into, table, self._route(rows, sources, destinations), names)

    def _route(self, rows: Rows, sources: RankRows, destinations: RankRows) -> "_Route":
        if rows.ids.tolist() != list(sources[self.rank]):
            raise ValueError(f"expected rows {sources[self.rank]} here, in this order; found {rows.ids.tolist()}")
        return _Route.of(self.rank, sources, destinations)

    def _add_fields(self, rows: Rows, into: Rows, table: RowTable, route: "_Route", names: Sequence[str]) -> Rows:
        """In one collective those per token, in another those per row."""
        per_token = [name for name in names if field_of(name).per_token]
        per_row = [name for name in names if not field_of(name).per_token]
        moved = self._per_token(rows, per_token, table, route) | self._per_row(rows, per_row, table, route)
        return replace(into, fields=into.fields | {name: moved[name] for name in names})

    def _per_token(self, rows: Rows, names: Sequence[str], table: RowTable, route: "_Route") -> dict[str, torch.Tensor]:
        """[b, R] each."""
        if not names:
            return {}
        sent = _is_token(rows.max_response_length, rows.response_lengths[route.outgoing])
        values = [_held(rows, name, (sent.shape[1],))[route.outgoing][sent] for name in names]
        received = self._all_to_all(torch.stack(values, dim=1), route, table.response_lengths)
        arrived = _is_token(table.max_response_length, table.response_lengths[route.arriving])
        moved = {}
        for name, flat in zip(names, received.unbind(dim=1), strict=True):
            field = torch.zeros(arrived.shape)
            field[arrived] = flat
            moved[name] = field[route.places]
        return moved

    def _per_row(self, rows: Rows, names: Sequence[str], table: RowTable, route: "_Route") -> dict[str, torch.Tensor]:
        """[b] or [b, K] each."""
        if not names:
            return {}
        values = [_held(rows, name) for name in names]
        columns = [
            field if field_of(name).has_columns else field[:, None] for name, field in zip(names, values, strict=True)
        ]
        sent = torch.cat(columns, dim=1)[route.outgoing]
        received = self._all_to_all(sent, route, torch.ones(len(table), dtype=torch.int64))[route.places]
        moved = zip(names, received.split([column.shape[1] for column in columns], dim=1), strict=True)
        return {name: found if field_of(name).has_columns else found[:, 0] for name, found in moved}

    def _all_to_all(self, sent: torch.Tensor, route: "_Route", sizes: torch.Tensor) -> torch.Tensor:
        """What arrives of each row's `sizes[row]` numbers, or rows of numbers, in the route's order."""
        outgoing, arriving = route.sizes(sizes, self.world_size)
        received = sent.new_empty(sum(arriving), *sent.shape[1:])
        dist.all_to_all_single(received, sent, arriving, outgoing, group=self.group)
        return received


@dataclass(frozen=True)
class _Route:
    """The way of rows from `sources` to `destinations`, as one rank has part in it; all int64.

    Attributes:
        outgoing: positions, among the rows here, of those to be sent, rank after rank; `departing` are their numbers,
            `targets` the ranks.
        arriving: numbers of the rows to come, rank after rank; `origins` are the ranks.
        places: of each row wanted here, its position in `arriving`.
    """

    outgoing: torch.Tensor
    departing: torch.Tensor
    targets: torch.Tensor
    arriving: torch.Tensor
    origins: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, rank: int, sources: RankRows, destinations: RankRows) -> "_Route":
        held, holders = _flat(sources)
        holder_of = torch.empty_like(held).index_copy_(0, held, holders)
        position_of = torch.full_like(held, -1)
        position_of[torch.tensor(sources[rank], dtype=torch.int64)] = torch.arange(len(sources[rank]))
        wanted, targets = _flat(destinations)
        is_mine = holder_of[wanted] == rank
        mine = torch.tensor(destinations[rank], dtype=torch.int64)
        origins, order = holder_of[mine].sort(stable=True)
        departing = wanted[is_mine]
        return cls(position_of[departing], departing, targets[is_mine], mine[order], origins, order.argsort())

    def sizes(self, of_row: torch.Tensor, world_size: int) -> tuple[list[int], list[int]]:
        """Of what goes to each rank, and of what comes from each, where row i is of size `of_row[i]`."""
        ends = ((self.targets, self.departing), (self.origins, self.arriving))
        none = torch.zeros(world_size, dtype=torch.int64)
        outgoing, arriving = (none.index_add(0, ranks, of_row[rows]).tolist() for ranks, rows in ends)
        return outgoing, arriving


def _flat(of_ranks: RankRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of all ranks in turn, and the rank of each."""
    rows = torch.tensor(list(chain.from_iterable(of_ranks)), dtype=torch.int64)
    return rows, torch.arange(len(of_ranks)).repeat_interleave(torch.tensor([len(rows) for rows in of_ranks]))


def _is_token(width: int, lengths: torch.Tensor) -> torch.Tensor:
    """[b, width] bool: what of a row is no padding."""
    return torch.arange(width) < lengths[:, None]


def _held(rows: Rows, name: str, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """A field's values, of this shape each; a rank without rows need not have it, but where it has columns."""
    if not len(rows) and not field_of(name).has_columns:
        return torch.zeros(0, *shape)
    return rows.field(name).to("cpu", torch.float32)


def empty_rows(ids: Sequence[int], table: RowTable) -> Rows:
    """Rows with their lengths, without tokens or fields yet."""
    index = torch.tensor(list(ids), dtype=torch.int64)
    return Rows(index, table.prompt_ids[index], table.prompt_lengths[index], table.response_lengths[index], [], {})
