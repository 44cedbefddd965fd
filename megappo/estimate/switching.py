"""What of the update a run would have on or off, and why, as a table that people can read."""

from megappo.architecture.switches import SWITCHES, Decision, Setting, decisions
from megappo.estimate.shapes import Shapes
from megappo.placement.picture import aligned
from megappo.placement.run_plan import RunPlan


def switch_table(plan: RunPlan, shapes: Shapes, *, on_gpu: bool, has_te: bool) -> str:
    """Return a line for each decision; components with the same decision share it.

    Args:
        has_te: TransformerEngine is installed.
    """
    found: dict[Decision, list[str]] = {}
    for name, spec in plan.components.items():
        setting = Setting(
            shapes.of(spec).architecture,
            spec.parallel.value,
            data=plan.layouts[name].data,
            dtype=plan.config.model.dtype,
            is_trained=spec.training is not None,
            on_gpu=on_gpu,
            has_te=has_te and plan.config.model.layer_spec != "torch",
        )
        for decision in decisions(setting):
            found.setdefault(decision, []).append(name)
    order = [switch.name for switch in SWITCHES]
    rows = sorted(found.items(), key=lambda item: order.index(item[0].name))
    return aligned([[one.name, "on" if one.is_on else "off", ", ".join(names), one.reason] for one, names in rows])
