"""Partitions and micro-batches: nothing lost, bounds kept, near the optimum, the same everywhere."""

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.batch.balance import balanced_partitions, micro_batches, partition_groups

CASES = settings(max_examples=200, deadline=None)


def sums(parts: list[list[int]], costs: list[int]) -> list[int]:
    return [sum(costs[i] for i in part) for part in parts]


def assert_covers(parts: list[list[int]], count: int) -> None:
    assert sorted(i for part in parts for i in part) == list(range(count))


@CASES
@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 12))
def test_partitions_lose_nothing_leave_none_empty_and_are_balanced(costs: list[int], k: int):
    parts = balanced_partitions(costs, k)
    assert len(parts) == k
    assert_covers(parts, len(costs))
    assert sum(not part for part in parts) == max(0, k - len(costs))
    assert parts == balanced_partitions(costs, k)
    # No heuristic of this kind is further apart than its largest item.
    assert max(sums(parts, costs)) - min(sums(parts, costs)) <= max(costs, default=0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_partitions_are_close_to_the_best_of_all(costs: list[int], k: int):
    assignments = itertools.product(range(k), repeat=len(costs))
    best = min(
        max(sum(c for c, p in zip(costs, parts, strict=True) if p == j) for j in range(k)) for parts in assignments
    )
    assert max(sums(balanced_partitions(costs, k), costs)) <= best * 4 / 3


def test_partitions_beat_the_greedy_rule_on_the_classic_example():
    """Karmarkar-Karp differences 8 7 6 5 4 to 2 (greedy longest-first: 17 against 13)."""
    assert sorted(sums(balanced_partitions([8, 7, 6, 5, 4], 2), [8, 7, 6, 5, 4])) == [14, 16]


@pytest.mark.parametrize(("costs", "k"), [([1, 2], 0), ([1, -2], 2)])
def test_partitions_refuse_nonsense(costs: list[int], k: int):
    with pytest.raises(ValueError, match="k >= 1 and costs >= 0"):
        balanced_partitions(costs, k)


@CASES
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(100, 400))
def test_micro_batches_keep_the_bound(lengths: list[int], max_tokens: int):
    fewest = micro_batches(lengths, max_tokens)
    assert all(fewest)
    assert_covers(fewest, len(lengths))
    assert all(total <= max_tokens for total in sums(fewest, lengths))
    assert len(fewest) >= -(-sum(lengths) // max_tokens)
    for rows in fewest:
        assert [lengths[row] for row in rows] == sorted((lengths[row] for row in rows), reverse=True)


@CASES
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(100, 400), st.integers(1, 50))
def test_as_many_micro_batches_as_are_wanted(lengths: list[int], max_tokens: int, wanted: int):
    fewest, found = micro_batches(lengths, max_tokens), micro_batches(lengths, max_tokens, at_least=wanted)
    assert all(found)
    assert_covers(found, len(lengths))
    assert all(total <= max_tokens for total in sums(found, lengths))
    wanted = min(wanted, len(lengths))
    if wanted <= len(fewest):
        assert found == fewest
    elif max(sums(balanced_partitions(lengths, wanted), lengths)) <= max_tokens:
        assert len(found) == wanted


def test_so_many_micro_batches_that_balancing_breaks_the_bound_are_not_made():
    """14 of at most 100 tokens hold all rows; balanced over 15, one would have more."""
    lengths = [41, 42, 57, 25, 41, 5, 33, 30, 46, 55, 54, 38, 37, 34, 54, 55, 43, 8, 1, 44, 52, 36, 22, 31, 41]
    lengths += [3, 32, 42, 23, 9, 56, 6, 60, 38, 52, 17, 47, 46, 2]
    assert max(sums(balanced_partitions(lengths, 15), lengths)) > 100
    found = micro_batches(lengths, 100, at_least=15)
    assert len(found) == 14 and max(sums(found, lengths)) <= 100


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_micro_batches_are_nearly_as_few_as_possible(lengths: list[int]):
    def fits(k: int) -> bool:
        bins = itertools.product(range(k), repeat=len(lengths))
        return any(
            all(sum(n for n, b in zip(lengths, bs, strict=True) if b == j) <= 10 for j in range(k)) for bs in bins
        )

    optimum = next(k for k in range(1, 7) if fits(k))
    assert optimum <= len(micro_batches(lengths, 10)) <= optimum + 1


def test_micro_batches_are_balanced_not_filled_up():
    assert sorted(sums(micro_batches([10] * 9, 80), [10] * 9)) == [40, 50]


def test_tight_packing_that_balancing_misses_is_found():
    """5 + 5 and 4 + 4 + 2 fill two bins to the last token; differencing gets 11 and 9."""
    lengths = [5, 5, 4, 4, 2]
    assert max(sums(balanced_partitions(lengths, 2), lengths)) > 10
    assert micro_batches(lengths, 10) == [[0, 1], [2, 3, 4]]


def test_no_rows_need_no_micro_batches():
    assert micro_batches([], 10) == []


def test_a_row_over_the_bound_is_named_with_the_remedy():
    with pytest.raises(
        ValueError, match="row 1 has 12 tokens, more than max_tokens_per_micro_batch 10: raise it to .* 12"
    ):
        micro_batches([3, 12], 10)


def test_rows_of_a_group_stay_together_and_groups_are_balanced():
    lengths, keys = [5, 1, 2, 2, 9, 1, 3, 3], [4, 4, 7, 7, 8, 8, 9, 9]
    parts = partition_groups(lengths, keys, partial(balanced_partitions, k=2))
    assert parts == [[0, 1, 6, 7], [2, 3, 4, 5]] and sums(parts, lengths) == [12, 14]
    singles = partition_groups(lengths, range(8), partial(balanced_partitions, k=3))
    assert singles == balanced_partitions(lengths, 3)
    assert partition_groups([], [], partial(balanced_partitions, k=2)) == [[], []]
