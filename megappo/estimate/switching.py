"""What of the update a run would have on or off, and why, as a table that people can read."""

from collections.abc import Mapping

from megappo.architecture.switches import SWITCHES, Decision, Setting, decisions
from megappo.config.schema import Config
from megappo.estimate.shapes import Shapes
from megappo.placement.components import components_of
from megappo.placement.layout import Layout
from megappo.placement.picture import aligned


def switch_table(config: Config, layouts: Mapping[str, Layout], shapes: Shapes, *, on_gpu: bool, has_te: bool) -> str:
    """A line for each decision that concerns a component of the run; components with the same share it.

    Args:
        has_te: TransformerEngine is there.
    """
    found: dict[Decision, list[str]] = {}
    for name, spec in components_of(config).items():
        setting = Setting(
            shapes.of(spec).architecture,
            spec.parallel.value,
            data=layouts[name].data,
            dtype=config.model.dtype,
            is_trained=spec.training is not None,
            on_gpu=on_gpu,
            has_te=has_te and config.model.layer_spec != "torch",
        )
        for decision in decisions(setting):
            found.setdefault(decision, []).append(name)
    order = [switch.name for switch in SWITCHES]
    rows = sorted(found.items(), key=lambda item: order.index(item[0].name))
    return aligned([[one.name, "on" if one.is_on else "off", ", ".join(names), one.reason] for one, names in rows])
