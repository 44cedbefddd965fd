"""Phases of a step: each is timed, and every model has on the device what the phase needs of it."""

from collections.abc import Iterator
from contextlib import contextmanager

from megappo.observe.metrics import Metric
from megappo.observe.timers import Timers
from megappo.placement.components import NOTHING, OPTIONAL_PHASES, uses_of
from megappo.runtime.failure import FAILED
from megappo.trainer.models import Models


class Phases:
    """`with phases("values"): ...` times a part of a step and wakes what it needs of each model.

    Tensors that the phase does not need sleep from its beginning on, if the model's offload key names them.

    Attributes:
        before: phase -> a function to call before it begins.
    """

    def __init__(self, models: Models):
        self.timers = Timers()
        self.offloads = models.offloads
        self._uses = uses_of(models.specs)
        self._phase = ""
        self.before = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Enter a phase. Phases of models that the run does not have do nothing and are not timed."""
        if phase in OPTIONAL_PHASES and phase not in self._uses:
            yield
            return
        if phase in self.before:
            self.before[phase]()
        outer = self._phase
        with self.timers(phase):
            self._enter(phase)
            try:
                yield
            finally:
                self._phase = outer
        if outer:  # restarted engines get the weights in the middle of a rollout
            self._enter(outer)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        uses = self._uses.get(phase, {})
        for name, offload in self.offloads.items():  # first, as this frees the memory that others wake into
            offload.rest(uses.get(name, NOTHING))
        for name, offload in self.offloads.items():
            offload.wake(uses.get(name, NOTHING))

    def seconds(self, phase: str) -> float:
        """Return the time spent in a phase in this step so far."""
        return self.timers.seconds(phase)

    def memory(self) -> dict[str, Metric]:
        """Return `Timers.memory`, `threads/failed` and, if anything is offloaded, `memory/offloaded_gib/sum`."""
        kept = sum(offload.host_bytes for offload in self.offloads.values())
        offloaded = {"memory/offloaded_gib/sum": Metric((kept / 2**30,), "sum")} if kept else {}
        return self.timers.memory() | offloaded | {"threads/failed": Metric((len(FAILED),), "sum")}
