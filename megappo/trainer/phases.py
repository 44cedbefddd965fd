"""The phases of a step: a part of it each, timed, for which every component has on the device what it needs."""

from collections.abc import Iterator
from contextlib import contextmanager

from megappo.observe.metrics import Metric
from megappo.observe.timers import Timers
from megappo.placement.uses import NOTHING, uses_of
from megappo.runtime.threads import FAILED
from megappo.trainer.models import Models


class Phases:
    """`with phases("values"): ...`: a part of a step, timed, for which every component has on the device what it needs.

    What it does not need sleeps from its beginning on, as far as the component's offload key says.
    """

    def __init__(self, models: Models):
        self.timers = Timers()
        self.offloads = models.offloads
        self._uses = uses_of(models.specs)
        self._phase = ""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        outer = self._phase
        with self.timers(phase):
            self._enter(phase)
            try:
                yield
            finally:
                self._phase = outer
        if outer:  # engines that fail in a rollout are given the weights in the middle of it
            self._enter(outer)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        uses = self._uses.get(phase, {})
        for name, offload in self.offloads.items():  # before any wakes: that is where its memory comes from
            offload.rest(uses.get(name, NOTHING))
        for name, offload in self.offloads.items():
            offload.wake(uses.get(name, NOTHING))

    def seconds(self, phase: str) -> float:
        """Of a phase, in this step so far."""
        return self.timers.seconds(phase)

    def memory(self) -> dict[str, Metric]:
        """As `Timers.memory`, with `memory/offloaded_gib/sum`: what this host keeps of what sleeps, if anything; and
        `threads/failed`."""
        kept = sum(offload.host_bytes for offload in self.offloads.values())
        offloaded = {"memory/offloaded_gib/sum": Metric((kept / 2**30,), "sum")} if kept else {}
        return self.timers.memory() | offloaded | {"threads/failed": Metric((len(FAILED),), "sum")}
