"""The phases of a step: a part of it each, timed, for which every component has on the device what it needs."""

from collections.abc import Iterator
from contextlib import contextmanager

from megappo.observe.timers import Timers
from megappo.placement.uses import NOTHING, uses_of
from megappo.trainer.models import Models


class Phases:
    """`with phases("values"): ...`: a part of a step, timed, for which every component has on the device what it needs.

    What it does not need sleeps from its beginning on, as far as the component's offload key says.
    """

    def __init__(self, models: Models):
        self.timers = Timers()
        self.current = ""
        self.offloads = models.offloads
        self._uses = uses_of(models.specs)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with self.timers(phase):
            self.current = phase
            uses = self._uses.get(phase, {})
            for name, offload in self.offloads.items():  # before any wakes: that is where its memory comes from
                offload.rest(uses.get(name, NOTHING))
            for name, offload in self.offloads.items():
                offload.wake(uses.get(name, NOTHING))
            yield
