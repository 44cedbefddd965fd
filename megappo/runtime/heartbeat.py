"""Heartbeats of a process: by them a watchdog sees that it makes progress, and the display what it is doing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

AFTER = "the part after "
"""Precedes a phase's name between that phase and the next."""


class PhaseCount(NamedTuple):
    """Progress within a phase: `done` of `total` units, such as responses; `tokens` written so far, 0 if unknown."""

    done: int
    total: int
    unit: str
    tokens: float = 0.0


class Heartbeat:
    """Progress of a process. Any thread may call its methods.

    Attributes:
        num_beats: heartbeats so far. Two threads at once may count as one.
        phase: part of a step in which the process is.
        since: when it entered the phase, by `time.monotonic`.
        step: the step that it trains, in words; "" before training.
        part: where in the phase it is, such as "mini-batch 2 of 8"; "" if the phase has no parts.
        counted: progress within that part; None while nothing is counted.
        num_phases: number of phases entered or left so far: the same on every rank that has come as far.
    """

    def __init__(self) -> None:
        self.num_beats = 0
        self.phase = "the set-up"
        self.since = time.monotonic()
        self.step = self.part = ""
        self.counted: PhaseCount | None = None
        self.num_phases = 0
        self._waits: set[object] = set()

    @property
    def is_waiting(self) -> bool:
        """True while the process waits for something that has a timeout of its own."""
        return bool(self._waits)

    def beat(self) -> None:
        """Note progress in work that may take long."""
        self.num_beats += 1

    def begin(self, part: str) -> None:
        """Note where in the phase the process is from now on."""
        self.part = part
        self.counted = None
        self.beat()

    def count(self, done: int, total: int, unit: str, tokens: float = 0.0) -> None:
        """Note progress within the phase; see `PhaseCount`."""
        self.counted = PhaseCount(done, total, unit, tokens)
        self.beat()

    def enter(self, phase: str) -> None:
        """Note where in a step the process is from now on."""
        self.phase = phase
        self.since = time.monotonic()
        self.num_phases += 1
        self.begin("")

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
