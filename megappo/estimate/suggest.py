"""Find layouts and offloads with which a run fits, the fastest by estimate first."""

from collections.abc import Iterable, Iterator
from itertools import product
from math import lcm
from typing import Any

import yaml

from megappo.architecture.fit import engine_fit_errors, fit_errors
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config, Parallel
from megappo.estimate.fitting import differences, fits, resolve_offload
from megappo.estimate.gpu_memory import Cluster, MemoryEstimate
from megappo.estimate.gpus import GIB, GPU
from megappo.estimate.seconds import TimeEstimate
from megappo.estimate.tables import written_seconds
from megappo.placement.components import AUTO
from megappo.placement.run_plan import RunPlan, plan_run

SHOWN = 3
REFINED = 6
"""Number of the best shared layouts for which the search tries other layouts of the critic."""
MOST_STAGES = 16
RECOMPUTE = ("none", "full")


def suggestions(plan: RunPlan, cluster: Cluster, gpu: GPU) -> str:
    """Return at most SHOWN configs with every component on all ranks, as YAML to paste: all keys that differ from the
    config, and each layout and offload."""
    found = [_text(number, plan, one) for number, one in enumerate(_best_layouts(plan, cluster, gpu), 1)]
    return "\n".join(found) or "  none: take more or larger GPUs, shorter rows or smaller micro-batches"


def _best_layouts(plan: RunPlan, cluster: Cluster, gpu: GPU) -> list[TimeEstimate]:
    """Try layouts that all models share, then, with the best of these, other layouts of the critic."""

    def best(configs: Iterable[Config], known: Iterable[TimeEstimate] = ()) -> list[TimeEstimate]:
        tried = [*known, *(_tried(config, plan.world_size, cluster, gpu) for config in configs)]
        fitting = {str(one.config): one for one in tried if one is not None}  # several ways may lead to one layout
        return sorted(fitting.values(), key=lambda one: one.step)

    policy = cluster.shapes.at(plan.config.model.path).architecture
    tensors = [size for size in _powers(cluster.gpus_per_node) if not any(engine_fit_errors(policy, size))]
    shared = []
    for layout, tensor, recompute in product(_layouts(list(plan.components), plan, cluster), tensors, RECOMPUTE):
        shared.append(_everywhere(plan, layout, recompute).changed("rollout.tensor_parallel", tensor))
    found = best(shared)[:REFINED]
    others = _layouts(["critic"], plan, cluster) if "critic" in plan.components else ()
    refined = [_with_auto(plan, one.config).changed("critic.parallel", other) for other, one in product(others, found)]
    return best(refined, found)[:SHOWN]


def _everywhere(plan: RunPlan, layout: Parallel, recompute: str) -> Config:
    """Return the config with every component on all ranks in a layout."""
    config = plan.requested.changed("placement.rollout", "all")
    for spec in plan.components.values():
        config = config.changed(spec.ranks.key, "all").changed(spec.parallel.key, layout)
    for training in plan.training.values():
        config = config.changed(f"{training.key}.recompute", recompute)
    return _with_auto(plan, config)


def _with_auto(plan: RunPlan, config: Config) -> Config:
    """Return the config with every offload undecided."""
    for spec in plan.components.values():
        config = config.changed(spec.offload.key, AUTO)
    return config


def _layouts(names: list[str], plan: RunPlan, cluster: Cluster) -> Iterator[Parallel]:
    """Yield the layouts that some models all fit in: tensor parallelism within a node, experts over a stage's ranks."""
    architectures = [cluster.shapes.of(plan.components[name]).architecture for name in names]
    experts = max(architecture.num_experts for architecture in architectures)
    sizes = _powers(cluster.gpus_per_node), _powers(MOST_STAGES), _powers(max(experts, 1))
    for tensor, pipeline, expert in product(*sizes):
        if plan.world_size % (pipeline * lcm(tensor, expert)):
            continue
        parallel = Parallel(tensor=tensor, pipeline=pipeline, expert=expert, sequence=tensor > 1)
        if not any(error for architecture in architectures for error in fit_errors(architecture, parallel)):
            yield parallel


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _tried(config: Config, world_size: int, cluster: Cluster, gpu: GPU) -> TimeEstimate | None:
    """Return the estimate of a config; None if it has no plan or does not fit."""
    try:
        plan = plan_run(config, world_size)
        memory = MemoryEstimate(resolve_offload(plan, cluster), cluster)
    except ConfigError:  # such as fewer trajectories than data-parallel shards
        return None
    return TimeEstimate(memory, gpu) if fits(memory) else None


def _text(number: int, plan: RunPlan, found: TimeEstimate) -> str:
    keys = differences(found.config, plan.requested, _everywhere(plan, Parallel(), "none"))
    nested: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        section = nested
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    most, phase = found.memory.peak(found.memory.fullest)
    title = (
        f"  # {number}: {written_seconds(found.step)} s a step; the fullest GPU holds {most / GIB:.1f} of "
        f"{found.gpu.memory / GIB:.1f} GiB, in {phase}"
    )
    text = yaml.safe_dump(nested, sort_keys=False, default_flow_style=None, width=200)
    return "\n".join([title, *(f"  {line}" for line in text.splitlines())])
