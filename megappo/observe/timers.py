"""Wall time of a step's phases, in seconds, and their peak memory, in GiB."""

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from megappo.observe.metrics import Metric, RankMetrics
from megappo.observe.timeline import Interval
from megappo.runtime.heartbeat import AFTER, heartbeat

GIB = 2**30
SAMPLE_SECONDS = 0.1
CHILDREN_SECONDS = 2.0
"""Seconds between two listings of this process's children."""


class Timers:
    """Measures phases: `with timers("rollout"): ...`, once or several times a step.

    Phases that stand directly in a step exclude each other, so they and `timing_s/other` add up to `timing_s/step`.
    A phase within another is reported as `timing_s/<outer>/<inner>` and counts in the outer one only. The outermost
    phases' peak memory is measured, too.
    """

    def __init__(self) -> None:
        self._memory = PhaseMemory()
        self._open: list[str] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._intervals: list[Interval] = []
        self._step_start = time.perf_counter()
        self._epoch = time.time() - self._step_start

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block. On a GPU a phase ends when its kernels have run. A profiler's trace has it by its name."""
        self._open.append(phase)
        name = "/".join(self._open)
        if name == phase:
            self._memory.start(phase)
        heartbeat.enter(name)
        start = time.perf_counter()
        try:
            with torch.profiler.record_function(name):
                yield
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
        finally:
            seconds = time.perf_counter() - start
            self._seconds[name] += seconds
            self._intervals.append(Interval(name, self._epoch + start, seconds))
            self._open.pop()
            heartbeat.enter(AFTER + name)
            if name == phase:
                self._memory.stop()

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase in this step so far."""
        return self._seconds.get(phase, 0.0)

    def restart(self) -> None:
        """Begin the first step now and forget what was measured: the set-up is no part of it."""
        self._step_start = time.perf_counter()
        self._seconds.clear()
        self._intervals.clear()
        self._memory.metrics()

    def memory(self) -> RankMetrics:
        """Return `memory/*` in GiB: peaks since the last call, including the peaks of an open phase so far."""
        return self._memory.metrics()

    def lap(self) -> dict[str, float]:
        """End the step and begin the next at the same instant, so that no time falls between steps.

        Returns:
            `timing_s/<phase>`, `timing_s/other` and `timing_s/step` in seconds.
        """
        now = time.perf_counter()
        step_seconds, self._step_start = now - self._step_start, now
        phases = sum(seconds for name, seconds in self._seconds.items() if "/" not in name)
        timings = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        timings |= {"timing_s/other": step_seconds - phases, "timing_s/step": step_seconds}
        return timings

    def take_intervals(self) -> list[Interval]:
        """Return the phases since the last call, in the order of their ends."""
        intervals, self._intervals = self._intervals, []
        return intervals


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
        self._children: list[psutil.Process] = []
        self._children_listed = -CHILDREN_SECONDS
        self._children_bytes = 0
        self._lock = threading.Lock()
        reference = weakref.ref(self)
        self._sampler = threading.Thread(target=_sample_often, name="memory-sampler", args=[reference], daemon=True)
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

    def metrics(self) -> RankMetrics:
        """Return the peaks since the last call, in GiB: `memory/<phase>_peak_gib`, and `memory/host_peak_gib/sum`, of
        resident memory. Empty once the thread has ended, which would have missed them."""
        if not self._sampler.is_alive():
            return {}
        with self._lock:
            peaks = {f"memory/{phase}_peak_gib": Metric((peak / GIB,), "max") for phase, peak in self._bytes.items()}
            peaks["memory/host_peak_gib/sum"] = Metric((self._host_bytes / GIB,), "sum")
            self._bytes.clear()
            self._host_bytes = 0
        return peaks

    def sample_all(self) -> None:
        """Measure this process and its children."""
        if time.monotonic() - self._children_listed > CHILDREN_SECONDS:
            self._children = self._own.children(recursive=True)
            self._children_listed = time.monotonic()
        self._children_bytes = sum(map(_resident_bytes, self._children))
        self._sample()

    def _sample(self) -> None:
        with self._lock:
            host_bytes = _resident_bytes(self._own) + self._children_bytes
            self._host_bytes = max(self._host_bytes, host_bytes)
            if self._phase is not None:
                used = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else host_bytes
                self._bytes[self._phase] = max(self._bytes.get(self._phase, 0), used)


def _sample_often(memory: Callable[[], PhaseMemory | None]) -> None:
    """Measure until nothing refers to the `PhaseMemory` any more."""
    while (measured := memory()) is not None:
        measured.sample_all()
        del measured
        time.sleep(SAMPLE_SECONDS)


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:  # a child that ended since the processes were listed
        return 0
