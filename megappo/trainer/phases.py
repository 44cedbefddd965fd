"""The phases of a step, and what each needs of every component on the device: the rest may sleep meanwhile."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megappo.models.offload import Use
from megappo.observe.timers import Timers
from megappo.placement.components import ComponentSpec
from megappo.trainer.models import Models

READ_WEIGHTS: Use = {"weights": False}
SAVE: Use = {"weights": False, "optimizer": False}
TRAIN: Use = {"weights": True, "gradients": True, "optimizer": True}
NOTHING: Use = {}


def uses_of(specs: Mapping[str, ComponentSpec]) -> dict[str, dict[str, Use]]:
    """Phase -> component -> what it needs; phases that need nothing of any component are left out."""
    uses: dict[str, dict[str, Use]] = defaultdict(dict)
    for name, spec in specs.items():
        if spec.forward is not None:
            uses[spec.forward.phase][name] = READ_WEIGHTS
            if spec.reference and "full_kl" in spec.forward.fields:
                uses[spec.forward.phase][spec.reference] = READ_WEIGHTS
        if spec.training is not None:
            uses[f"update_{name}"][name] = TRAIN
            uses["save"][name] = SAVE
            if spec.reference and spec.training.full_kl:
                uses[f"update_{name}"][spec.reference] = READ_WEIGHTS
    for phase in ("sync", "export"):
        uses[phase]["actor"] = READ_WEIGHTS
    return uses


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
