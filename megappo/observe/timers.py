"""Wall time of a step's phases, in seconds."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megappo.observe.memory import PhaseMemory
from megappo.observe.metrics import Metric
from megappo.runtime.heartbeat import heartbeat


class Timers:
    """Measures phases: `with timers("rollout"): ...`, once or several times a step.

    Phases that stand directly in a step exclude each other, so they and `timing_s/other` add up to `timing_s/step`.
    A phase inside another is reported as `timing_s/<outer>/<inner>` and counts in the outer one only. The outermost
    phases' peak memory is measured, too.
    """

    def __init__(self) -> None:
        self._memory = PhaseMemory()
        self._open: list[str] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._step_start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block. On a GPU a phase ends when its kernels have run."""
        self._open.append(phase)
        name = "/".join(self._open)
        if name == phase:
            self._memory.start(phase)
        heartbeat.enter(name)
        start = time.perf_counter()
        try:
            yield
            _wait_for_kernels()
        finally:
            self._seconds[name] += time.perf_counter() - start
            self._open.pop()
            heartbeat.enter(f"what follows {name}")
            if name == phase:
                self._memory.stop()

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase in this step so far."""
        return self._seconds.get(phase, 0.0)

    def restart(self) -> None:
        """Begin the first step now and forget what was measured: the set-up is no part of it."""
        self._step_start = time.perf_counter()
        self._seconds.clear()
        self._memory.metrics()

    def memory(self) -> dict[str, Metric]:
        """`memory/*` in GiB, peaks since the last call: of an open phase, too, so far."""
        return self._memory.metrics()

    def lap(self) -> dict[str, float]:
        """End the step and begin the next at the same instant, so that no time falls between steps.

        Returns:
            `timing_s/<phase>`, `timing_s/other` and `timing_s/step` in seconds.
        Raises:
            RuntimeError: called inside a phase.
        """
        if self._open:
            raise RuntimeError(f"the step cannot end inside the phase {'/'.join(self._open)!r}: leave it first")
        now = time.perf_counter()
        step_seconds, self._step_start = now - self._step_start, now
        phases = sum(seconds for name, seconds in self._seconds.items() if "/" not in name)
        timings = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        timings |= {"timing_s/other": step_seconds - phases, "timing_s/step": step_seconds}
        return timings


def _wait_for_kernels() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
