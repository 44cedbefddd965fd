"""Find layouts and offloads with which a run fits, the fastest by estimate first."""

from collections.abc import Iterator
from itertools import product
from math import lcm
from operator import attrgetter
from textwrap import indent

import yaml

from megappo.architecture.fit import engine_fit_errors, fit_errors
from megappo.config.config_error import ConfigError
from megappo.config.loading import nested
from megappo.config.schema import Config, Parallel
from megappo.estimate.fitting import differences, fits, resolve_offload
from megappo.estimate.gpu_memory import Cluster, MemoryEstimate
from megappo.estimate.gpus import GIB, GPU
from megappo.estimate.seconds import TimeEstimate
from megappo.estimate.tables import written_seconds
from megappo.placement.components import AUTO
from megappo.placement.run_plan import RunPlan, plan_run

SHOWN = 3
MOST_STAGES = 16
RECOMPUTE = ("none", "full")


def suggestions(plan: RunPlan, cluster: Cluster, gpu: GPU) -> str:
    """Return at most SHOWN configs with every component on all ranks, in one layout, as YAML to paste: all keys that
    differ from the config, and each layout and offload."""
    texts = []
    for number, found in enumerate(fitting_runs(plan, cluster, gpu)[:SHOWN], 1):
        texts.append(_text(number, plan, found))
    return "\n".join(texts) or "  none: take more or larger GPUs, shorter rows or smaller micro-batches"


def fitting_runs(plan: RunPlan, cluster: Cluster, gpu: GPU) -> list[TimeEstimate]:
    """Return the estimates of all configs with every component on all ranks, in one layout, that fit, the fastest
    first."""
    policy = cluster.shapes.at(plan.config.model.path).architecture
    tensors = [size for size in _powers(cluster.gpus_per_node) if not any(engine_fit_errors(policy, size))]
    fitting = []
    for layout, tensor, recompute in product(_layouts(plan, cluster), tensors, RECOMPUTE):
        config = _everywhere(plan, layout, recompute).changed("rollout.tensor_parallel", tensor)
        try:
            candidate = resolve_offload(plan_run(config, plan.world_size), cluster)
            memory = MemoryEstimate(candidate, cluster)
        except ConfigError:  # such as fewer trajectories than data-parallel shards
            continue
        if fits(memory):
            fitting.append(TimeEstimate(memory, gpu))
    return sorted(fitting, key=attrgetter("step"))


def _everywhere(plan: RunPlan, layout: Parallel, recompute: str) -> Config:
    """Return the config with every component on all ranks in a layout, and every offload undecided."""
    config = plan.requested.changed("placement.rollout", "all")
    for spec in plan.components.values():
        config = config.changed(spec.ranks.key, "all").changed(spec.parallel.key, layout)
        config = config.changed(spec.offload.key, AUTO)
    for training in plan.training.values():
        config = config.changed(f"{training.key}.recompute", recompute)
    return config


def _layouts(plan: RunPlan, cluster: Cluster) -> Iterator[Parallel]:
    """Yield the layouts that all models fit in: tensor parallelism within a node, experts over a stage's ranks."""
    architectures = [cluster.shapes.of(spec).architecture for spec in plan.components.values()]
    experts = max(architecture.num_experts for architecture in architectures)
    tensors = _powers(cluster.gpus_per_node)
    for tensor, pipeline, expert in product(tensors, _powers(MOST_STAGES), _powers(max(experts, 1))):
        parallel = Parallel(tensor=tensor, pipeline=pipeline, expert=expert, sequence=tensor > 1)
        errors = [error for architecture in architectures for error in fit_errors(architecture, parallel)]
        if not errors and plan.world_size % (pipeline * lcm(tensor, expert)) == 0:
            yield parallel


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _text(number: int, plan: RunPlan, found: TimeEstimate) -> str:
    keys = differences(found.config, plan.requested, _everywhere(plan, Parallel(), "none"))
    most, phase = found.memory.fullest.peak
    held = f"{most / GIB:.1f} of {found.gpu.memory / GIB:.1f} GiB, in {phase}"
    title = f"  # {number}: {written_seconds(found.step)} s a step; the fullest GPU holds {held}\n"
    text = yaml.safe_dump(nested(keys), sort_keys=False, default_flow_style=None, width=200)
    return title + indent(text.rstrip(), "  ")
