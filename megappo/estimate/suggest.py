"""Layouts and offloads with which a run fits, the fastest by estimate first."""

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import product
from math import lcm
from typing import Any

import yaml

from megappo.architecture.fit import engine_fit_errors, fit_errors
from megappo.config.errors import ConfigError
from megappo.config.schema import Config, Parallel
from megappo.estimate.fitting import differences, fits, resolve_offload
from megappo.estimate.gpus import GIB, GPU
from megappo.estimate.memory import Cluster, MemoryEstimate
from megappo.estimate.report import written_seconds
from megappo.estimate.seconds import TimeEstimate
from megappo.estimate.shapes import Shape
from megappo.placement.components import AUTO, components_of
from megappo.placement.run_plan import RunPlan, plan_run

SHOWN = 3
REFINED = 6
"""The best shared layouts, for which a critic's own is looked for."""
MOST_STAGES = 16
RECOMPUTE = ("none", "full")


def suggestions(plan: RunPlan, cluster: Cluster, gpu: GPU) -> str:
    """Every component on all ranks, as YAML to paste: all that differs from the config, and each layout and offload."""
    found = [_text(number, plan.requested, one) for number, one in enumerate(best_layouts(plan, cluster, gpu), 1)]
    return "\n".join(found) or "  none: take more or larger GPUs, shorter rows or smaller micro-batches"


def best_layouts(plan: RunPlan, cluster: Cluster, gpu: GPU) -> list[TimeEstimate]:
    """At most SHOWN: of layouts that all models share, and of the best of these with another one for the critic."""
    config, world_size = plan.requested.changed("placement.rollout", "all"), plan.world_size
    policy = cluster.shapes.at(config.model.path).architecture
    ways = [ways for ways in _powers(cluster.gpus_per_node) if not any(engine_fit_errors(policy, ways))]
    specs = plan.components
    shared = _layouts([cluster.shapes.of(spec) for spec in specs.values()], cluster, world_size)
    candidates = (
        _everywhere(config, layout, recompute).changed("rollout.tensor_parallel", tensor)
        for layout, tensor, recompute in product(shared, ways, RECOMPUTE)
    )
    found = _best((_tried(one, world_size, cluster, gpu) for one in candidates), REFINED)
    others = _layouts([cluster.shapes.of(specs["critic"])], cluster, world_size) if "critic" in specs else ()
    changed = [_reopened(one.config).changed("critic.parallel", layout) for layout, one in product(others, found)]
    return _best([*found, *(_tried(one, world_size, cluster, gpu) for one in changed)], SHOWN)


def _everywhere(config: Config, layout: Parallel, recompute: str) -> Config:
    """Every component on all ranks in a layout."""
    for spec in components_of(config).values():
        config = config.changed(spec.ranks.key, "all").changed(spec.parallel.key, layout)
        if spec.training is not None:
            config = config.changed(f"{spec.training.key}.recompute", recompute)
    return _reopened(config)


def _reopened(config: Config) -> Config:
    """Every offload to be settled."""
    for spec in components_of(config).values():
        config = config.changed(spec.offload.key, AUTO)
    return config


def _layouts(shapes: list[Shape], cluster: Cluster, world_size: int) -> Iterator[Parallel]:
    """Those that all of some models fit in: tensor parallelism within a node, experts over ranks of a stage."""
    experts = max(shape.architecture.num_experts for shape in shapes)
    of_node = cluster.gpus_per_node
    for tensor, pipeline, expert in product(_powers(of_node), _powers(MOST_STAGES), _powers(max(experts, 1))):
        parallel = Parallel(tensor=tensor, pipeline=pipeline, expert=expert, sequence=tensor > 1)
        cut = pipeline * lcm(tensor, expert)
        if world_size % cut == 0 and not any(any(fit_errors(shape.architecture, parallel)) for shape in shapes):
            yield parallel


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _tried(config: Config, world_size: int, cluster: Cluster, gpu: GPU) -> TimeEstimate | None:
    """None where the layout is none, or does not fit."""
    try:
        plan = plan_run(config, world_size)
        memory = MemoryEstimate(resolve_offload(plan, cluster), cluster)
    except ConfigError:  # such as fewer trajectories than data-parallel shards
        return None
    return TimeEstimate(memory, gpu) if fits(memory) else None


def _best(found: Iterable[TimeEstimate | None], count: int) -> list[TimeEstimate]:
    fitting = {str(one.config): one for one in found if one is not None}  # a layout is found in several ways
    return sorted(fitting.values(), key=lambda one: one.step)[:count]


def _text(number: int, config: Config, found: TimeEstimate) -> str:
    plain, values = _everywhere(config, Parallel(), "none"), dict[str, Any]()
    for key, value in differences(found.config, config, plain).items():
        *sections, name = key.split(".")
        reduce(lambda at, section: at.setdefault(section, {}), sections, values)[name] = value
    most, phase = found.memory.peak(found.memory.fullest)
    title = (
        f"  # {number}: {written_seconds(found.step)} s a step; the fullest GPU holds {most / GIB:.1f} of "
        f"{found.gpu.memory / GIB:.1f} GiB, in {phase}"
    )
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=200)
    return "\n".join([title, *(f"  {line}" for line in text.splitlines())])
