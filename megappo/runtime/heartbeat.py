"""Heartbeats of a process: a watchdog sees by them that the run makes progress."""

from collections.abc import Iterator
from contextlib import contextmanager


class Heartbeat:
    """Progress of a process. Any thread may call its methods.

    Attributes:
        num_beats: heartbeats so far. Two threads at once may count as one.
        phase: where in a step the process is.
        num_phases: number of phases entered or left so far: the same on every rank that has come as far.
    """

    def __init__(self) -> None:
        self.num_beats = 0
        self.phase = "the set-up"
        self.num_phases = 0
        self._waits: set[object] = set()

    @property
    def is_waiting(self) -> bool:
        """True while the process waits for something that has a timeout of its own."""
        return bool(self._waits)

    def beat(self) -> None:
        """Note progress in work that may take long."""
        self.num_beats += 1

    def enter(self, phase: str) -> None:
        """Note where in a step the process is from now on."""
        self.phase = phase
        self.num_phases += 1
        self.beat()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait, without heartbeats, for another process whose answer has a timeout."""
        wait = object()
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)
            self.beat()


heartbeat = Heartbeat()
"""The heartbeat of this process."""
