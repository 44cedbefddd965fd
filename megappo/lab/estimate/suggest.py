"""Find layouts and offloads with which a run fits, the fastest by estimate first."""

from collections.abc import Iterator
from itertools import product
from math import ceil, lcm
from operator import attrgetter
from textwrap import indent

import yaml

from megappo.architecture.fit import engine_fit_errors, fit_errors
from megappo.config.config_error import ConfigError
from megappo.config.loading import nested
from megappo.config.schema import Config
from megappo.config.sections import Parallel
from megappo.lab.estimate.fitting import ENGINE_SHARE, differences, fits, resolve_offload
from megappo.lab.estimate.gpu_memory import ROLLOUT, Cluster, MemoryEstimate
from megappo.lab.estimate.seconds import TimeEstimate
from megappo.lab.estimate.tables import written_seconds
from megappo.placement.components import AUTO
from megappo.placement.layout import format_ranks
from megappo.placement.run_plan import RunPlan, plan_run
from megappo.runtime.gpus import GIB, GPU

SHOWN = 3
SPLITS = 8
"""Shares of the GPUs, of which the search gives the engines one or several."""
MOST_STAGES = 16
RECOMPUTE = ("none", "full")
EVERYWHERE = ("all", "all")
ENGINE_SIZE = "rollout.tensor_parallel"
LARGER_SHARES = (0.9, 0.8)
"""Shares of the memory that an engine alone on its GPUs may have, the best first."""


def suggestions(plan: RunPlan, cluster: Cluster, gpu: GPU) -> str:
    """Return at most SHOWN configs as YAML to paste: all keys that differ from the config, and each layout and offload.

    Every component is on all ranks, in one layout; with rollout.max_staleness the engines are on ranks of their own.
    """
    found = together = fitting_runs(plan, cluster, gpu)
    if plan.requested.rollout.runs_ahead:
        found = apart_runs(plan, cluster, gpu, together)
    texts = [suggestion(number, plan, one) for number, one in enumerate(found[:SHOWN], 1)]
    if found is not together and together:
        texts.append(f"  # everything on all ranks, with rollout.max_staleness=0: {_seconds(together[0])}")
    return "\n".join(texts) or "  none: take more or larger GPUs, shorter rows or smaller micro-batches"


def fitting_runs(plan: RunPlan, cluster: Cluster, gpu: GPU) -> list[TimeEstimate]:
    """Return the estimates of all configs with every component on all ranks, in one layout, that fit, the fastest
    first. There engines and models take turns."""
    sizes = _engine_sizes(plan, cluster)
    fitting: list[TimeEstimate] = []
    for layout, size, recompute in product(_layouts(plan, cluster), sizes, RECOMPUTE):
        config = _placed(plan, EVERYWHERE, layout, recompute)
        fitting += _fitting(plan, config.changed(ENGINE_SIZE, size), cluster, gpu)
    return sorted(fitting, key=attrgetter("step"))


def most_split(plan: RunPlan, cluster: Cluster) -> MemoryEstimate:
    """Return the memory of a run whose models and engines are split the most, with recomputation and offload."""
    *_, layout = _layouts(plan, cluster)
    config = _placed(plan, EVERYWHERE, layout, "full").changed(ENGINE_SIZE, _engine_sizes(plan, cluster)[-1])
    return MemoryEstimate(resolve_offload(plan_run(config, plan.world_size), cluster), cluster)


def apart_runs(plan: RunPlan, cluster: Cluster, gpu: GPU, together: list[TimeEstimate]) -> list[TimeEstimate]:
    """Return the estimates of configs whose engines have ranks of their own, one for each number of them, the fastest
    first.

    The models' layout is the first one that fits of `together`, in the order of the seconds that models take there.
    """
    by_models = sorted(together, key=lambda one: one.step - one.seconds[ROLLOUT])
    layouts = dict.fromkeys((one.config.actor.parallel, one.config.actor.recompute) for one in by_models)
    sizes = _engine_sizes(plan, cluster)
    found = []
    for ranks in _splits(plan.world_size, cluster.gpus_per_node):
        for layout, recompute in layouts:
            config = _placed(plan, ranks, layout, recompute)
            fitting = [one for size in sizes for one in _alone(plan, config.changed(ENGINE_SIZE, size), cluster, gpu)]
            if fitting:
                found.append(min(fitting, key=attrgetter("step")))
                break
    return sorted(found, key=attrgetter("step"))


def _splits(num_ranks: int, gpus_per_node: int) -> Iterator[tuple[str, str]]:
    """Yield the ranks of models and of engines: each has whole nodes of several."""
    unit = gpus_per_node if num_ranks > gpus_per_node else 1
    stride = unit * ceil(num_ranks / unit / SPLITS)
    for first in range(stride, num_ranks, stride):
        yield format_ranks(range(first)), format_ranks(range(first, num_ranks))


def _alone(plan: RunPlan, config: Config, cluster: Cluster, gpu: GPU) -> list[TimeEstimate]:
    """Return the estimate of a config with the largest share of memory for its engines that fits; [] if none fits."""
    own = config.rollout.mem_fraction_static
    for share in (*(larger for larger in LARGER_SHARES if larger > own), own):
        if fitting := [*_fitting(plan, config.changed(ENGINE_SHARE, share), cluster, gpu)]:
            return fitting
    return []


def _fitting(plan: RunPlan, config: Config, cluster: Cluster, gpu: GPU) -> Iterator[TimeEstimate]:
    """Yield the estimate of a config if it is a plan that fits."""
    try:
        candidate = resolve_offload(plan_run(config, plan.world_size), cluster)
        memory = MemoryEstimate(candidate, cluster)
    except ConfigError:  # such as fewer trajectories than data-parallel shards
        return
    if fits(memory):
        yield TimeEstimate(memory, gpu)


def _placed(plan: RunPlan, ranks: tuple[str, str], layout: Parallel, recompute: str) -> Config:
    """Return the config with all models on the same ranks in a layout, and every offload undecided.

    Args:
        ranks: ranks of the models, and ranks of the engines.
    """
    models, engines = ranks
    config = plan.requested.changed("placement.rollout", engines)
    for spec in plan.components.values():
        config = config.changed(spec.ranks.key, models).changed(spec.parallel.key, layout)
        config = config.changed(spec.offload.key, AUTO)
    for training in plan.training.values():
        config = config.changed(f"{training.key}.recompute", recompute)
    return config


def _engine_sizes(plan: RunPlan, cluster: Cluster) -> list[int]:
    """Return the tensor parallelism that an engine may have."""
    if not plan.config.recipe.has_rollouts:
        return [plan.config.rollout.tensor_parallel]
    policy = cluster.shapes.at(plan.config.model.path).architecture
    return [size for size in _powers(cluster.gpus_per_node) if not any(engine_fit_errors(policy, size))]


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


def suggestion(number: int, plan: RunPlan, found: TimeEstimate) -> str:
    """Return a config that fits as YAML to paste, indented below its number, seconds and memory."""
    keys = differences(found.config, plan.requested, _placed(plan, EVERYWHERE, Parallel(), "none"))
    if max_staleness := found.config.rollout.max_staleness:
        keys["rollout.max_staleness"] = max_staleness
    most, phase = found.memory.fullest.peak
    held = f"{most / GIB:.1f} of {found.gpu.memory / GIB:.1f} GiB, in {phase}"
    title = f"  # {number}: {_seconds(found)}; the fullest GPU holds {held}\n"
    text = yaml.safe_dump(nested(keys), sort_keys=False, default_flow_style=None, width=200)
    return title + indent(text.rstrip(), "  ")


def _seconds(found: TimeEstimate) -> str:
    return f"{written_seconds(found.step)} s a step"
