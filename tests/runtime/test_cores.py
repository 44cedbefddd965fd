"""Ranks keep to their share of the cores; what they start does not."""

import json
import os
import subprocess
import sys

import pytest

from megappo.runtime.machine import share

PRINT_CORES = "import os; print(sorted(os.sched_getaffinity(0)))"
BOUND = f"""
import json, os, subprocess, sys, threading
from megappo.runtime.machine import bind, unbound, usable
def started():
    return json.loads(subprocess.check_output([sys.executable, "-c", {PRINT_CORES!r}]))
def of_all_threads():
    return [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
before = threading.Event()
threading.Thread(target=before.wait, daemon=True).start()
bind(*map(int, sys.argv[1:]))
after = threading.Event()
threading.Thread(target=after.wait, daemon=True).start()
with unbound():
    free = started()
print(json.dumps({{"threads": of_all_threads(), "started": started(), "free": free, "usable": sorted(usable())}}))
"""


@pytest.mark.parametrize(("num_cores", "num_ranks"), [(2, 2), (7, 3), (16, 2), (5, 5)])
def test_each_core_is_in_one_share_and_shares_differ_by_one(num_cores: int, num_ranks: int) -> None:
    cores = list(range(10, 10 + num_cores))
    shares = [share(cores, rank, num_ranks) for rank in range(num_ranks)]
    assert [core for one in shares for core in one] == cores
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def bound(local_rank: int, num_ranks: int, num_cores: int, num_threads: int = 1) -> dict:
    """Return the cores and threads of a process that was bound with these arguments."""
    command = [sys.executable, "-c", BOUND, *map(str, (local_rank, num_ranks, num_cores, num_threads))]
    return json.loads(subprocess.check_output(command, timeout=60))


def test_threads_of_before_and_after_are_bound_and_a_process_started_unbound_is_not() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("of one core all have the same")
    last = cores[len(cores) // 2 :]
    assert bound(1, 2, len(cores)) == {"threads": [last] * 3, "started": last, "free": cores, "usable": cores}


@pytest.mark.parametrize(
    ("more_ranks", "fewer_cores", "num_threads"),
    [(1, 0, 1), (0, 1, 1), (0, 0, 2)],
    ids=["too many ranks", "a limit", "too many threads"],
)
def test_nothing_is_bound_where_shares_would_overlap(more_ranks: int, fewer_cores: int, num_threads: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    found = bound(0, len(cores) + more_ranks, len(cores) - fewer_cores, num_threads)
    assert found == {"threads": [cores] * 3, "started": cores, "free": cores, "usable": cores}
