"""Bytes that this process reads, and its peak private memory, sampled every millisecond.

Memory is RssAnon + RssShmem of /proc/self/status. Pages of mapped files do not count, because the kernel reclaims them
when it needs memory.
"""

import threading
import time

MIB = 2**20
MEMORY = ("RssAnon:", "RssShmem:")


class PeakMemory:
    """Samples this process's own memory on a thread, from construction on."""

    def __init__(self) -> None:
        self.baseline = self.peak = own_memory()
        threading.Thread(target=self._sample, daemon=True).start()

    def take(self) -> int:
        """Bytes above the baseline at the peak since the last call."""
        peak, self.peak = max(self.peak, own_memory()), 0
        return peak - self.baseline

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, own_memory())
            time.sleep(0.001)


def bytes_read() -> int:
    """By this process so far, whether from a disk or from what the system has kept of it."""
    with open("/proc/self/io") as counts:
        return next(int(line.split()[1]) for line in counts if line.startswith("rchar:"))


def own_memory() -> int:
    """Bytes of private and shared anonymous memory of this process that are in RAM."""
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(MEMORY))
