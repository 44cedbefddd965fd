"""A process's heartbeats, by which a watchdog sees that the run makes progress."""

from collections.abc import Iterator
from contextlib import contextmanager


class Life:
    """What a process has done so far. Any thread may call.

    Attributes:
        signs: how often it has shown that it gets on. Two threads at once may count as one.
        phase: where in a step it is.
        num_phases: how often it has entered or left one: the same on every rank that has come as far.
    """

    def __init__(self) -> None:
        self.signs = 0
        self.phase = "the set-up"
        self.num_phases = 0
        self._waits: set[object] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for something that has a time limit of its own."""
        return bool(self._waits)

    def sign(self) -> None:
        """Say that some work is done which may take its time."""
        self.signs += 1

    def enter(self, phase: str) -> None:
        """Say where in a step it is from now on."""
        self.phase = phase
        self.num_phases += 1
        self.sign()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the process waits for another one's answer and ends the wait itself after a time limit: meanwhile it
        needs to give no sign."""
        wait = object()
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)
            self.sign()


LIFE = Life()
"""Of this process."""
