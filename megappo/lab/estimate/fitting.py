"""Make a run fit its GPUs: decide each `auto`, and find remedies for a run that does not fit."""

from collections.abc import Iterable, Iterator
from typing import Any

from megappo.config.eval_sets import longest_request, longest_unit
from megappo.config.loading import leaves
from megappo.config.schema import Config
from megappo.lab.estimate.gpu_memory import Cluster, MemoryEstimate
from megappo.placement.components import AUTO
from megappo.placement.run_plan import RunPlan

SPARE = 0.05
"""Share of a GPU that the estimate leaves free: allocators fragment, and an estimate is not exact."""
ENGINE_SHARE = "rollout.mem_fraction_static"
ENGINE_SHARES = tuple(number / 10 for number in range(1, 10))
Change = tuple[str, Any]
"""A key and its new value; for an offload, the kind of tensors to add to it."""


def resolve_offload(plan: RunPlan, cluster: Cluster | None) -> RunPlan:
    """Replace every `offload: auto` by the least that makes the run fit, or by everything if nothing does; then
    `rollout.sleep: auto` by "never" if the run still fits, else by "always".

    Args:
        cluster: None without GPUs, where nothing has to be offloaded and no engine sleeps.
    """
    undecided = [spec.offload.key for spec in plan.components.values() if spec.offload.value == AUTO]
    for key in undecided:
        plan = plan.changed(plan.config.changed(key, ()))
    if cluster is not None and undecided:
        offloads = [change for change in _offloads(plan) if change[0] in undecided]
        plan = _fitting(plan, offloads, cluster) or _change(plan, offloads)
    if plan.config.rollout.sleep != AUTO:
        return plan
    awake = _change(plan, [("rollout.sleep", "never")])
    stays_awake = cluster is not None and fits(MemoryEstimate(awake, cluster))
    return awake if stays_awake else _change(plan, [("rollout.sleep", "always")])


def fits(estimate: MemoryEstimate) -> bool:
    """Return whether every GPU has SPARE free in every phase, and the engines have room for one row at least."""
    most, _ = estimate.fullest.peak
    return most <= (1 - SPARE) * estimate.cluster.gpu_bytes and _has_room(estimate)


def _has_room(estimate: MemoryEstimate) -> bool:
    config = estimate.config
    return not config.starts_engines or estimate.engine.cache_tokens >= longest_request(config).tokens


def remedies(plan: RunPlan, cluster: Cluster) -> dict[str, object] | None:
    """Return keys and values with which a run that does not fit would; None if none of these help.

    An engine without room for a row gets a larger share of the GPU first. The other keys come in the order of their
    cost: gradients, which are freed, other offloads, optimizer states in host memory, recomputation, smaller
    micro-batches, a smaller engine.
    """
    candidates = [plan]
    if not _has_room(MemoryEstimate(plan, cluster)):
        larger = [share for share in ENGINE_SHARES if share > plan.config.rollout.mem_fraction_static]
        candidates = [_change(plan, [(ENGINE_SHARE, share)]) for share in larger]
    for candidate in candidates:
        fitting = _fitting(candidate, _changes(candidate), cluster)
        if fitting is not None:
            return differences(fitting.config, plan.config)
    return None


def differences(config: Config, *others: Config) -> dict[str, object]:
    """Return each key whose value differs from the value in one of the others, with its value."""
    values = [dict(leaves(one.model_dump(mode="json"))) for one in others]
    found: dict[str, object] = {}
    for key, value in leaves(config.model_dump(mode="json")):
        if any(other.get(key) != value for other in values):
            found[key] = value
    return found


def _fitting(plan: RunPlan, changes: Iterable[Change], cluster: Cluster) -> RunPlan | None:
    """Return the plan with the fewest of the changes, in their order, that make it fit; None if all do not."""

    def fit(chosen: list[Change]) -> bool:
        return fits(MemoryEstimate(_change(plan, chosen), cluster))

    needed: list[Change] = []
    remaining = iter(changes)
    while not fit(needed):
        change = next(remaining, None)
        if change is None:
            return None
        needed.append(change)
    for change in reversed(needed[:-1]):  # the last one is needed
        fewer = [one for one in needed if one is not change]
        needed = fewer if fit(fewer) else needed
    return _change(plan, needed)


def _changes(plan: RunPlan) -> Iterator[Change]:
    rollout = plan.config.rollout
    unit = longest_unit(plan.config)
    if rollout.sleep == "never":
        yield "rollout.sleep", "always"
    yield from _offloads(plan)
    for training in plan.training.values():
        if training.settings.optim.distributed:
            yield f"{training.key}.optim.offload_fraction", 1.0
    for training in plan.training.values():
        yield f"{training.key}.recompute", "full"
    for key, most in dict.fromkeys(spec.max_tokens for spec in plan.components.values()):
        if most > unit:
            yield key, max(most // 2, unit)
    for share in reversed(ENGINE_SHARES) if plan.config.recipe.has_rollouts else ():
        if share < rollout.mem_fraction_static:
            yield ENGINE_SHARE, share


def _offloads(plan: RunPlan) -> Iterator[Change]:
    """Yield the offload of one kind of a component's tensors at a time, the cheapest first: gradients are freed and
    allocated again, a frozen model's weights are copied once, optimizer states move once per update, a trained model's
    weights most often, the actor's for the sync, too."""
    trained = list(plan.training)
    frozen = [name for name, spec in plan.components.items() if name not in plan.training and not spec.base]
    actor_last = sorted(trained, key=lambda name: name == "actor")
    order = (("gradients", trained), ("weights", frozen), ("optimizer", actor_last), ("weights", actor_last))
    for kind, names in order:
        for name in names:
            if key := plan.components[name].offload.key:
                yield key, kind


def _change(plan: RunPlan, changes: Iterable[Change]) -> RunPlan:
    config = plan.config
    offloads = dict(spec.offload for spec in plan.components.values())
    for key, value in changes:
        if key in offloads:
            value = offloads[key] = tuple(dict.fromkeys((*offloads[key], value)))
        config = config.changed(key, value)
    return plan.changed(config)
