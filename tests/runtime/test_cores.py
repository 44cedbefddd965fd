"""Ranks keep to their share of the cores; what they start does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.runtime.machine import bind_near, share

PRINT_CORES = "import os; print(sorted(os.sched_getaffinity(0)))"
GPU = "0000:1b:00.0"
BOUND = f"""
import json, os, subprocess, sys, threading
from pathlib import Path
from megappo.runtime.machine import bind, bind_near, unbound, usable
def started():
    return json.loads(subprocess.check_output([sys.executable, "-c", {PRINT_CORES!r}]))
def of_all_threads():
    return [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
before = threading.Event()
threading.Thread(target=before.wait, daemon=True).start()
bind(*map(int, sys.argv[1:])) if sys.argv[2:] else print(bind_near({GPU!r}, Path(sys.argv[1])), file=sys.stderr)
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


def write_mask(sysfs: Path, cores: set[int]) -> None:
    """Write the cores near the GPU as the kernel does: words of 32 bits in hexadecimal, the highest first."""
    mask = sum(1 << core for core in cores)
    words = [f"{mask >> shift & 0xFFFFFFFF:08x}" for shift in (64, 32, 0)]
    folder = sysfs / "bus/pci/devices" / GPU
    folder.mkdir(parents=True)
    (folder / "local_cpus").write_text(",".join(words) + "\n")


def test_a_rank_is_bound_to_its_cores_near_its_gpu_and_what_it_starts_is_not(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("of one core all have the same")
    last = cores[len(cores) // 2 :]
    write_mask(tmp_path, {*last, 90})  # the job has no core 90
    done = subprocess.run([sys.executable, "-c", BOUND, tmp_path], capture_output=True, text=True, timeout=60)
    found = {"threads": [last] * 3, "started": last, "free": cores, "usable": cores}
    assert json.loads(done.stdout) == found
    assert done.stderr == f"bound to {len(last)} of its {len(cores)} cores: the NUMA node of its GPU, {GPU}\n"


@pytest.mark.parametrize("near", [None, {90}, {*range(90)}], ids=["unknown", "none", "all"])
def test_nothing_is_bound_where_the_gpus_node_has_no_core_or_all(near: set[int] | None, tmp_path: Path) -> None:
    if near is not None:
        write_mask(tmp_path, near)
    cores = os.sched_getaffinity(0)
    assert bind_near(GPU, tmp_path) == bind_near("", tmp_path) == ""
    assert os.sched_getaffinity(0) == cores
