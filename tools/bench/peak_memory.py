"""Bytes that this process reads, and its peak private memory, sampled every millisecond.

Memory is RssAnon + RssShmem of /proc/self/status. Pages of mapped files do not count, because the kernel reclaims them
when it needs memory.
"""

import threading
import time

MIB = 2**20
MEMORY = ("RssAnon:", "RssShmem:")


class PeakMemory:
    """Sample this process's private memory on a thread, from construction on."""

    def __init__(self) -> None:
        self.baseline = self.peak = own_memory()
        threading.Thread(target=self._sample, daemon=True).start()

    def take(self) -> int:
        """Return the peak above the baseline since the last call, in bytes."""
        peak, self.peak = max(self.peak, own_memory()), 0
        return peak - self.baseline

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, own_memory())
            time.sleep(0.001)


def bytes_read() -> int:
    """Return the bytes that this process has read so far, from disk or from the page cache."""
    with open("/proc/self/io") as counts:
        return next(int(line.split()[1]) for line in counts if line.startswith("rchar:"))


def own_memory() -> int:
    """Return the bytes of private and shared anonymous memory of this process that are in RAM."""
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(MEMORY))
