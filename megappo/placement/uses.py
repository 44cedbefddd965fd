"""What each phase of a step needs of every component on the device: the rest may sleep meanwhile. Without torch."""

from collections import defaultdict
from collections.abc import Mapping

from megappo.config.kinds import TensorKind
from megappo.placement.components import ComponentSpec

Use = Mapping[TensorKind, bool]
"""The kinds of tensors that something needs of a model on the device -> whether it changes them."""
READ_WEIGHTS: Use = {"weights": False}
LOAD: Use = {"weights": True, "optimizer": True}
"""To load a checkpoint."""
SAVE: Use = {"weights": False, "optimizer": False}
TRAIN: Use = {"weights": True, "gradients": True, "optimizer": True}
NOTHING: Use = {}
OPTIONAL_PHASES = ("values", "ref_log_probs", "update_critic")
"""Phases that runs without a critic, or without a reference policy, do not have."""


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
