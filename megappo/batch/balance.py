"""Balancing of rows over data-parallel ranks and micro-batches. Deterministic: all ranks compute the same."""

import heapq
from collections.abc import Callable, Sequence

_Part = tuple[int, tuple[int, ...]]
"""A cost and the items that have it together."""


def balanced_partitions(costs: list[int], k: int) -> list[list[int]]:
    """Partition item numbers 0..len(costs)-1 into k parts of nearly equal cost, each sorted, ordered by first item.

    No part is empty where there are at least k items; otherwise the empty ones come last.

    Raises:
        ValueError: k < 1 or a negative cost.
    Source: Karmarkar and Karp 1982, the largest differencing method for k parts; used so by verl and slime.
    """
    if k < 1 or any(cost < 0 for cost in costs):
        raise ValueError(f"cannot partition into {k} parts: needs k >= 1 and costs >= 0")
    # Heap of partial solutions: (-spread, tie-break, parts by falling cost without the empty ones).
    heap: list[tuple[int, int, list[_Part]]] = []
    for item, cost in enumerate(costs):
        heap.append((-cost, item, [(cost, (item,))]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = _merge(first, second, k)
        smallest = merged[-1][0] if len(merged) == k else 0
        heapq.heappush(heap, (smallest - merged[0][0], tie, merged))
    parts: list[list[int]] = []
    for _, _, solution in heap:
        parts = sorted(sorted(items) for _, items in solution)
    return parts + [[] for _ in range(k - len(parts))]


def _merge(first: list[_Part], second: list[_Part], k: int) -> list[_Part]:
    """Join the costliest parts of one solution with the cheapest (or empty) ones of the other."""
    num_joined = max(0, len(first) + len(second) - k)
    first_alone = len(first) - num_joined
    second_alone = len(second) - num_joined
    merged = first[:first_alone]
    for (cost, items), (other_cost, others) in zip(first[first_alone:], reversed(second[second_alone:]), strict=True):
        merged.append((cost + other_cost, items + others))
    return sorted(merged + second[:second_alone], key=lambda part: -part[0])


def micro_batches(lengths: list[int], max_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Pack rows into few bins of at most max_tokens, balanced by tokens.

    Args:
        lengths: tokens of each row.
        max_tokens: bound on a bin's tokens.
        at_least: number of bins, as far as there are rows; fewer where this number of balanced bins would break the
            bound.

    Returns:
        Row positions of each bin, longest row first. At most as many bins as first-fit-decreasing needs (11/9 of the
        optimum + 6/9), or `at_least`.

    Raises:
        ValueError: a row longer than max_tokens, naming it.
    """
    for row, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"row {row} has {length} tokens, more than max_tokens_per_micro_batch {max_tokens}: "
                f"raise it to at least {length}, or lower data.max_prompt_length or rollout.max_response_length"
            )
    # Bisect the number of bins between a lower bound and what first-fit-decreasing needs.
    best = _first_fit_decreasing(lengths, max_tokens)
    low = max(1, -(-sum(lengths) // max_tokens), sum(2 * length > max_tokens for length in lengths))
    fewest = min(at_least, len(lengths))
    low = max(low, fewest)
    high = max(len(best), fewest)
    while low <= high:
        middle = (low + high) // 2
        bins = balanced_partitions(lengths, middle)
        if any(sum(lengths[row] for row in rows) > max_tokens for rows in bins):
            low = middle + 1
        else:
            best = bins
            high = middle - 1
    return [sorted(rows, key=lambda row: -lengths[row]) for rows in best]


def _first_fit_decreasing(lengths: list[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        fit = next((i for i, free in enumerate(room) if free >= lengths[row]), len(bins))
        if fit == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[fit].append(row)
        room[fit] -= lengths[row]
    return sorted(sorted(rows) for rows in bins)


def partition_groups(
    lengths: Sequence[int], keys: Sequence[int], partition: Callable[[list[int]], list[list[int]]]
) -> list[list[int]]:
    """Partition rows so that rows with the same key stay together, next to each other.

    Args:
        keys: keys of the rows; equal ones stand next to each other.
        partition: partitions items by their costs.
    """
    groups: dict[int, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    rows_of = list(groups.values())
    parts = partition([sum(lengths[row] for row in rows) for rows in rows_of])
    return [[row for group in part for row in rows_of[group]] for part in parts]
