"""Peak memory of a step's phases, in GiB."""

import os
import threading
import time
import weakref
from collections.abc import Callable

import psutil
import torch

from megappo.observe.metrics import Metric

_GIB = 2**30
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_SECONDS = 0.1
_CHILDREN_SECONDS = 2.0


class PhaseMemory:
    """Peak memory of each phase on this rank: the GPU's allocator on a GPU, else resident memory.

    Resident memory is summed over this process and all its children (an SGLang engine is one) and sampled ten times a
    second by a thread; pages that they share count in each, so it errs upwards. At a phase's end this process alone is
    read again, as each process takes a while.
    """

    def __init__(self) -> None:
        self._phase: str | None = None
        self._bytes: dict[str, int] = {}
        self._host_bytes = 0
        self._own = psutil.Process()
        self._own_memory = os.open("/proc/self/statm", os.O_RDONLY)  # kept open: read at each phase's end
        self._children: list[psutil.Process] = []
        self._children_listed = 0.0
        self._children_bytes = 0
        self._lock = threading.Lock()
        self._sampler = threading.Thread(
            target=_sample_often, name="memory-sampler", args=[weakref.ref(self)], daemon=True
        )
        self._sampler.start()

    def start(self, phase: str) -> None:
        """Begin a phase; phases do not nest."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._phase = phase

    def stop(self) -> None:
        """End the phase that was begun last."""
        self._sample()
        self._phase = None

    def metrics(self) -> dict[str, Metric]:
        """Peaks since the last call, in GiB: `memory/<phase>_peak_gib`, and `memory/host_peak_gib/sum`, of resident
        memory. Empty once the thread has ended, which would have missed them."""
        if not self._sampler.is_alive():
            return {}
        with self._lock:
            peaks = {f"memory/{phase}_peak_gib": Metric((peak / _GIB,), "max") for phase, peak in self._bytes.items()}
            peaks["memory/host_peak_gib/sum"] = Metric((self._host_bytes / _GIB,), "sum")
            self._bytes.clear()
            self._host_bytes = 0
        return peaks

    def sample_all(self) -> None:
        """Measure this process and its children."""
        self._sample_children()
        self._sample()

    def _sample(self) -> None:
        with self._lock:
            host_bytes = self._own_bytes() + self._children_bytes
            self._host_bytes = max(self._host_bytes, host_bytes)
            if self._phase is not None:
                used = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else host_bytes
                self._bytes[self._phase] = max(self._bytes.get(self._phase, 0), used)

    def _own_bytes(self) -> int:
        return int(os.pread(self._own_memory, 128, 0).split()[1]) * _PAGE_BYTES

    def _sample_children(self) -> None:
        if time.monotonic() - self._children_listed > _CHILDREN_SECONDS:
            self._children = self._own.children(recursive=True)
            self._children_listed = time.monotonic()
        self._children_bytes = sum(map(_resident_bytes, self._children))


def _sample_often(memory: Callable[[], PhaseMemory | None]) -> None:
    """Measure until nothing refers to the `PhaseMemory` any more."""
    while (measured := memory()) is not None:
        measured.sample_all()
        del measured
        time.sleep(_SAMPLE_SECONDS)


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:  # a child that ended since the processes were listed
        return 0
