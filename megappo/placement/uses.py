"""List the tensors that each phase of a step needs on the device; all others may be offloaded. Without torch."""

from collections import defaultdict
from collections.abc import Mapping

from megappo.config.values import TensorKind
from megappo.placement.components import ComponentSpec

DeviceUse = Mapping[TensorKind, bool]
"""Kinds of tensors of a model that must be on the device -> whether they change there."""
READ_WEIGHTS: DeviceUse = {"weights": False}
LOAD: DeviceUse = {"weights": True, "optimizer": True}
"""The use of a model into which a checkpoint is loaded."""
SAVE: DeviceUse = {"weights": False, "optimizer": False}
TRAIN: DeviceUse = {"weights": True, "gradients": True, "optimizer": True}
NOTHING: DeviceUse = {}
OPTIONAL_PHASES = ("values", "ref_log_probs", "update_critic")
"""Phases that runs without a critic, or without a reference policy, do not have."""


def uses_of(specs: Mapping[str, ComponentSpec]) -> dict[str, dict[str, DeviceUse]]:
    """Return phase -> component -> its use; phases that use no component are left out."""
    uses: dict[str, dict[str, DeviceUse]] = defaultdict(dict)
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
