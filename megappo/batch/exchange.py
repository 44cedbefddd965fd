"""Moving rows of the batch between ranks: each row goes only where it is needed, and only its own tokens travel."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megappo.batch.fields import field_of
from megappo.batch.rows import NO_TOKENS, Rows
from megappo.batch.spans import taken
from megappo.errors import ActionableError
from megappo.placement.layout import Layout

RankRows = tuple[tuple[int, ...], ...]
"""Row numbers at each world rank, now or to be, in the order in which the rank keeps them."""


HEAD_BYTES, HEADS_BYTES = 256, 2**15
"""Of a value that is shared, to go with its length: so many, and in a small world more, as many as all ranks' heads may
have together. Most values have no more, and then one collective is all."""
LENGTH_BYTES = 8


class OtherRankError(ActionableError, RuntimeError):
    """Another rank failed, so this one cannot continue."""

    is_consequence = True


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


def entries_of(rows: Rows) -> np.ndarray:
    """What is to be known everywhere of rows, [b, 5] int32: prompt_ids, ids, and lengths of prompts, responses and what
    the policy wrote of these."""
    policy_lengths = rows.response_mask.sum(dim=1).long()
    columns = (rows.prompt_ids, rows.ids, rows.prompt_lengths, rows.response_lengths, policy_lengths)
    return torch.stack(columns, dim=1).int().numpy()


class Exchange:
    """Row exchange over one CPU group of all ranks. Every rank must call every method, in the same order.

    Args:
        group: process group over the whole world whose backend moves CPU tensors (gloo).
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.head_bytes = max(HEAD_BYTES, HEADS_BYTES // self.world_size)

    def share(self, value: object) -> list:
        """Every rank's value, on every rank. For small things: lengths, metrics, errors."""
        mine = pickle.dumps(value)
        length = len(mine).to_bytes(LENGTH_BYTES, "little")
        heads = self._all_gather(length + mine[: self.head_bytes], LENGTH_BYTES + self.head_bytes)
        lengths = [int.from_bytes(head[:LENGTH_BYTES], "little") for head in heads]
        rests = self._all_gather(mine[self.head_bytes :], max(lengths) - self.head_bytes)
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
        """As `numbered`; all ranks together."""
        return self.numbered(rows, self.share(entries_of(rows)))

    def numbered(self, rows: Rows, of_ranks: Sequence[np.ndarray]) -> tuple[Rows, RowTable, RankRows]:
        """The rows with their numbers over all ranks, what is known of all of them, and where they are.

        Rows are numbered prompt after prompt, those of a prompt by the ids that they had.

        Args:
            of_ranks: `entries_of` every rank's rows.
        Raises:
            ValueError: two rows of a prompt have the same id.
        """
        entries = np.concatenate(of_ranks)
        order = np.lexsort((entries[:, 1], entries[:, 0]))
        ordered = entries[order]
        is_twice = (ordered[1:, :2] == ordered[:-1, :2]).all(axis=1)
        if is_twice.any():
            twice = list(map(tuple, ordered[1:, :2][is_twice][:10].tolist()))
            raise ValueError(f"each row must be there once; found several times, by prompt_id and id: {twice}")
        numbers = np.empty(len(order), np.int64)
        numbers[order] = np.arange(len(order))
        ends = np.cumsum([len(of_rank) for of_rank in of_ranks])
        sources = tuple(tuple(part.tolist()) for part in np.split(numbers, ends[:-1]))
        prompt_ids, _, *lengths = torch.from_numpy(ordered).long().unbind(dim=1)
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
        tokens, *loads = self._all_to_all([_tokens(rows, table, route), *_fields(rows, table, route, names)])
        moved = replace(empty_rows(destinations[self.rank], table), input_ids=tokens)
        return _with_fields(moved, names, loads)

    def move_fields(
        self, found: Sequence[tuple[Rows, RankRows, Sequence[str]]], into: Rows, table: RowTable, destinations: RankRows
    ) -> Rows:
        """`into`, the rows `destinations[rank]` this rank already has, with the named fields of rows found elsewhere.

        Args:
            found: rows here, their `sources` and the names; several of them travel together.
            Others, and Raises: as `move`.
        """
        loads = []
        for rows, sources, names in found:
            loads += _fields(rows, table, self._route(rows, sources, destinations), names)
        return _with_fields(into, [name for _, _, names in found for name in names], self._all_to_all(loads))

    def _route(self, rows: Rows, sources: RankRows, destinations: RankRows) -> "_Route":
        if rows.ids.tolist() != list(sources[self.rank]):
            raise ValueError(f"expected rows {sources[self.rank]} here, in this order; found {rows.ids.tolist()}")
        return _Route.of(self.rank, sources, destinations)

    def _all_to_all(self, loads: Sequence["_Load"]) -> list[Any]:
        """What the loads become where they arrive; all in one collective, in which ranks get one after the other."""
        if not loads:
            return []
        outgoing, arriving = zip(*(load.route.sizes(load.sizes, self.world_size) for load in loads), strict=True)
        to_ranks, from_ranks = (
            [sum(of_rank) for of_rank in zip(*sizes, strict=True)] for sizes in (outgoing, arriving)
        )
        parts = [load.sent.split(sizes) for load, sizes in zip(loads, outgoing, strict=True)]
        sent = torch.cat(list(chain.from_iterable(zip(*parts, strict=True))))
        received = sent.new_empty(sum(from_ranks))
        dist.all_to_all_single(received, sent, from_ranks, to_ranks, group=self.group)
        pieces = received.split(list(chain.from_iterable(zip(*arriving, strict=True))))
        return [load.unpacked(torch.cat(pieces[i :: len(loads)])) for i, load in enumerate(loads)]


@dataclass(frozen=True)
class _Load:
    """Numbers of rows that travel, as int32 of the same bits.

    Attributes:
        route: the rows' way.
        sent: of the rows that leave, flat, in the route's order.
        sizes: how many each row of the table has.
        unpacked: from those of the rows that arrive, flat, in the route's order, to what was asked for.
    """

    route: "_Route"
    sent: torch.Tensor
    sizes: torch.Tensor
    unpacked: Callable[[torch.Tensor], Any]


def _tokens(rows: Rows, table: RowTable, route: "_Route") -> _Load:
    """Unpacked, row after row."""
    lengths = table.prompt_lengths + table.response_lengths
    sent = taken(rows.input_ids, rows.lengths, route.outgoing).to("cpu", torch.int32)
    return _Load(route, sent, lengths, lambda received: taken(received.long(), lengths[route.arriving], route.places))


def _fields(rows: Rows, table: RowTable, route: "_Route", names: Sequence[str]) -> list[_Load]:
    """Those per token, and those per row, unpacked dicts of them by name."""
    per_token = [name for name in names if field_of(name).per_token]
    per_row = [name for name in names if not field_of(name).per_token]
    loads = [_per_token(rows, per_token, table, route)] if per_token else []
    return [*loads, _per_row(rows, per_row, table, route)] if per_row else loads


def _with_fields(rows: Rows, names: Sequence[str], found: Sequence[dict[str, torch.Tensor]]) -> Rows:
    moved = dict(chain.from_iterable(of_load.items() for of_load in found))
    return replace(rows, fields=rows.fields | {name: moved[name] for name in names})


def _per_token(rows: Rows, names: Sequence[str], table: RowTable, route: "_Route") -> _Load:
    """Unpacked, [b, R] each."""
    is_sent = _is_token(rows.max_response_length, rows.response_lengths[route.outgoing])
    values = [_held(rows, name, (is_sent.shape[1],))[route.outgoing][is_sent] for name in names]

    def unpacked(received: torch.Tensor) -> dict[str, torch.Tensor]:
        arrived = _is_token(table.max_response_length, table.response_lengths[route.arriving])
        moved = {}
        for name, flat in zip(names, received.view(torch.float32).reshape(-1, len(names)).unbind(1), strict=True):
            field = torch.zeros(arrived.shape)
            field[arrived] = flat
            moved[name] = field[route.places]
        return moved

    sent = torch.stack(values, dim=1).flatten().view(torch.int32)
    return _Load(route, sent, table.response_lengths * len(names), unpacked)


def _per_row(rows: Rows, names: Sequence[str], table: RowTable, route: "_Route") -> _Load:
    """Unpacked, [b] or [b, K] each."""
    values = [_held(rows, name) for name in names]
    columns = [
        field if field_of(name).has_columns else field[:, None] for name, field in zip(names, values, strict=True)
    ]
    widths = [column.shape[1] for column in columns]

    def unpacked(received: torch.Tensor) -> dict[str, torch.Tensor]:
        found = received.view(torch.float32).reshape(-1, sum(widths))[route.places].split(widths, dim=1)
        moved = zip(names, found, strict=True)
        return {name: field if field_of(name).has_columns else field[:, 0] for name, field in moved}

    sent = torch.cat(columns, dim=1)[route.outgoing].flatten().view(torch.int32)
    return _Load(route, sent, torch.full((len(table),), sum(widths), dtype=torch.int64), unpacked)


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
    @lru_cache(maxsize=8)  # a step takes few ways, some of them several times
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
    return Rows(index, table.prompt_ids[index], table.prompt_lengths[index], table.response_lengths[index], NO_TOKENS)
