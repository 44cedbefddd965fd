"""Layouts and offloads with which a run fits, the fastest by estimate first."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import yaml

from megappo.architecture.fit import engine_fit_errors, fit_errors
from megappo.config.errors import ConfigError
from megappo.config.schema import Config, Parallel
from megappo.estimate.fitting import AUTO, fits, settled
from megappo.estimate.gpus import GIB, GPU
from megappo.estimate.memory import GPUS_PER_NODE, MemoryEstimate
from megappo.estimate.seconds import TimeEstimate
from megappo.estimate.shapes import Shape, Shapes
from megappo.placement.components import components_of

SHOWN = 3
REFINED = 6
"""The best shared layouts, for which a critic's own is looked for."""
MOST_STAGES = 16
RECOMPUTE = ("none", "full")


@dataclass(frozen=True)
class Suggestion:
    """A config that fits, with its seconds of a step and its fullest GPU."""

    config: Config
    seconds: float
    peak_bytes: float
    phase: str


def suggestions(config: Config, world_size: int, gpu: GPU, shapes: Shapes) -> str:
    """As YAML to paste, every component on all ranks; of all else the config's values are kept."""
    found = best_layouts(config, world_size, gpu, shapes)
    if not found:
        return "  none: take more or larger GPUs, shorter rows or smaller micro-batches"
    return "\n".join(_text(number, one, gpu) for number, one in enumerate(found, 1))


def best_layouts(config: Config, world_size: int, gpu: GPU, shapes: Shapes) -> list[Suggestion]:
    """At most SHOWN: of layouts that all models share, and of the best of these with another one for the critic."""
    base = _everywhere(config)
    specs = components_of(base)
    ways = [ways for ways in _powers(min(world_size, GPUS_PER_NODE)) if not _engine_misfits(base, ways, shapes)]
    shared = list(_layouts({name: shapes.of(spec) for name, spec in specs.items()}, world_size))
    tried = [
        _tried(_with_layout(base, dict.fromkeys(specs, layout), tensor, recompute), world_size, gpu, shapes)
        for layout, tensor, recompute in product(shared, ways, RECOMPUTE)
    ]
    found = _best(tried, REFINED)
    if "critic" in specs:
        others = list(_layouts({"critic": shapes.of(specs["critic"])}, world_size))
        for one, layout in product(tuple(found), others):
            changed = one.config.changed("critic.parallel", layout).changed("critic.offload", AUTO)
            if (better := _tried(changed, world_size, gpu, shapes)) is not None:
                found.append(better)
    return _best(found, SHOWN)


def _everywhere(config: Config) -> Config:
    """Every component on all ranks, the reference like the actor, offloads open."""
    for key in ("actor", "critic", "rollout"):
        config = config.changed(f"placement.{key}", "all")
    config = config.changed("placement.ref", None).changed("ref.parallel", None)
    for spec in components_of(config).values():
        config = config.changed(spec.offload.key, AUTO) if spec.offload.key else config
    return config


def _with_layout(config: Config, layouts: dict[str, Parallel], tensor: int, recompute: str) -> Config:
    for name, spec in components_of(config).items():
        if spec.training is not None:
            config = config.changed(spec.parallel.key, layouts[name]).changed(f"{name}.recompute", recompute)
    return config.changed("rollout.tensor_parallel", tensor)


def _layouts(shapes: dict[str, Shape], world_size: int) -> Iterator[Parallel]:
    """Those that all of some models fit in: tensor parallelism within a node, experts over ranks of a stage."""
    experts = max(shape.architecture.num_experts for shape in shapes.values())
    for tensor, pipeline in product(_powers(GPUS_PER_NODE), _powers(MOST_STAGES)):
        if world_size % (tensor * pipeline):
            continue
        stage = world_size // pipeline
        for expert in _powers(min(experts, stage)) if experts else [1]:
            parallel = Parallel(tensor=tensor, pipeline=pipeline, expert=expert, sequence=tensor > 1)
            if stage % expert == 0 and not any(_misfits(shape, parallel) for shape in shapes.values()):
                yield parallel


def _misfits(shape: Shape, parallel: Parallel) -> bool:
    return any(fit_errors(shape.architecture, parallel))


def _engine_misfits(config: Config, ways: int, shapes: Shapes) -> bool:
    return any(engine_fit_errors(shapes.at(config.model.path).architecture, ways))


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _tried(config: Config, world_size: int, gpu: GPU, shapes: Shapes) -> Suggestion | None:
    """None where the layout is none, or does not fit."""
    try:
        config = settled(config, world_size, gpu.memory, shapes)
        estimate = MemoryEstimate(config, world_size, gpu.memory, shapes)
    except ConfigError:  # such as fewer trajectories than data-parallel shards
        return None
    if not fits(estimate):
        return None
    peak, _, phase = estimate.peak()
    return Suggestion(config, TimeEstimate(estimate, gpu).step, peak, phase)


def _best(found: Iterable[Suggestion | None], count: int) -> list[Suggestion]:
    fitting = {str(one.config): one for one in found if one is not None}  # a layout is found in several ways
    return sorted(fitting.values(), key=lambda one: one.seconds)[:count]


def _text(number: int, found: Suggestion, gpu: GPU) -> str:
    config, specs = found.config, components_of(found.config)
    values: dict[str, object] = {"placement": {", ".join(name for name in (*specs, "rollout") if name != "ref"): "all"}}
    for name, spec in specs.items():
        section: dict[str, object] = {}
        if spec.training is not None:
            section["parallel"] = spec.parallel.value.model_dump(exclude_defaults=True)
            section["recompute"] = spec.training.section.recompute
        section["offload"] = list(spec.offload.value)
        values[name] = section
    values["rollout"] = {"tensor_parallel": config.rollout.tensor_parallel}
    title = (
        f"  # {number}: {found.seconds:,.3g} s a step; the fullest GPU holds {found.peak_bytes / GIB:.1f} of "
        f"{gpu.memory / GIB:.1f} GiB, in {found.phase}"
    )
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=200)
    return "\n".join([title, *(f"  {line}" for line in text.splitlines())])
