"""The cores of a node on which ranks compute. It imports the standard library only, since any process imports it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_BEFORE: list[set[int]] = []
"""The cores of this process before it was bound to its share; [] where it is not."""


def share(cores: Sequence[int], rank: int, num_ranks: int) -> Sequence[int]:
    """Return a rank's share, neighbours, of the cores; there are at least as many as ranks."""
    return cores[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks]


def bind(local_rank: int, num_ranks: int, num_cores: int, num_threads: int) -> None:
    """Bind this process's threads, and those that they start, to its share of the node's cores.

    A collective wakes a rank several times. On two cores the kernel puts it behind the other rank in one time of three,
    though a core is idle, and it waits for 3 ms. Bound, two ranks on idle cores take 5 to 10 % less for an update of a
    small model, and a sixth less on busy ones. Open MPI binds ranks by default, too. Nothing is done where there are
    fewer cores than ranks or than threads in a share, and where a container has a limit: others may have the same cores
    then.

    Args:
        num_ranks: of this node.
        num_cores: that the process may use by all limits.
        num_threads: that compute at the same time.
    """
    mine = os.sched_getaffinity(0)
    ours = share(sorted(mine), local_rank, num_ranks)
    if num_ranks <= len(mine) == num_cores and num_threads <= len(ours):
        _BEFORE[:] = [mine]
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread), ours)


def usable() -> set[int]:
    """Return the cores that this process may use, or might before it was bound."""
    return _BEFORE[0] if _BEFORE else os.sched_getaffinity(0)


@contextmanager
def unbound() -> Iterator[None]:
    """Let a process that is started meanwhile use all cores that this one had before it was bound."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, usable())
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)
