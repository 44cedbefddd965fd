"""Making a run fit its GPUs: what `auto` stands for, and what to change where a run does not fit."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter

from megappo.config.checks import longest_request, longest_row
from megappo.config.loading import leaves
from megappo.config.schema import Config
from megappo.estimate.memory import Cluster, MemoryEstimate
from megappo.placement.components import AUTO
from megappo.placement.run_plan import RunPlan

SPARE = 0.05
"""Share of a GPU that the estimate leaves free: allocators fragment, and it is no more than an estimate."""
ENGINE_SHARE = "rollout.mem_fraction_static"
ENGINE_SHARES = tuple(number / 10 for number in range(1, 10))
Change = Callable[[Config], Config]


def resolve_offload(plan: RunPlan, cluster: Cluster | None) -> RunPlan:
    """Replace every `offload: auto` by the least that makes the run fit, or by everything if nothing does; then
    `rollout.sleep: auto` by "never" if the run still fits, else by "always".

    Args:
        cluster: None without GPUs, where nothing has to be offloaded and no engine sleeps.
    """
    plan = _resolve_components(plan, cluster)
    if plan.config.rollout.sleep != AUTO:
        return plan
    awake = _change(plan, [_setting("rollout.sleep", "never")])
    stays_awake = cluster is not None and fits(MemoryEstimate(awake, cluster))
    return awake if stays_awake else _change(plan, [_setting("rollout.sleep", "always")])


def _resolve_components(plan: RunPlan, cluster: Cluster | None) -> RunPlan:
    undecided = {name: spec.offload.key for name, spec in plan.components.items() if spec.offload.value == AUTO}
    plan = _change(plan, [_setting(key, ()) for key in undecided.values()])
    if cluster is None or not undecided:
        return plan
    offloads = [offload for name, offload in _offloads(plan) if name in undecided]
    return _fitting(plan, offloads, cluster) or _change(plan, offloads)


def fits(estimate: MemoryEstimate) -> bool:
    """Whether every GPU has SPARE left in every phase, and the engines room for one row at least."""
    most, _ = estimate.peak(estimate.fullest)
    return most <= (1 - SPARE) * estimate.cluster.gpu_bytes and _has_room(estimate)


def _has_room(estimate: MemoryEstimate) -> bool:
    is_elsewhere = bool(estimate.config.rollout.engines)  # on GPUs that nothing is known of
    return is_elsewhere or estimate.engine.cache_tokens >= longest_request(estimate.config)


def remedies(plan: RunPlan, cluster: Cluster) -> dict[str, object] | None:
    """Return keys and values with which a run that does not fit would; None if none of these help.

    An engine without room for a row gets a larger share of the GPU first. Of the rest, what costs least comes first:
    gradients, which are freed, other offloads, recomputation, smaller micro-batches, a smaller engine.
    """
    for roomy in _with_room(plan, cluster):
        if (fitting := _fitting(roomy, _changes(roomy), cluster)) is not None:
            return differences(fitting.config, plan.config)
    return None


def _with_room(plan: RunPlan, cluster: Cluster) -> list[RunPlan]:
    """Return the plan if its engines have room for a row, else with each larger share of the GPU that gives it."""
    if _has_room(MemoryEstimate(plan, cluster)):
        return [plan]
    larger = [share for share in ENGINE_SHARES if share > plan.config.rollout.mem_fraction_static]
    changed = [_change(plan, [_setting(ENGINE_SHARE, share)]) for share in larger]
    return [one for one in changed if _has_room(MemoryEstimate(one, cluster))]


def differences(config: Config, *others: Config) -> dict[str, object]:
    """The keys whose values are not those of all others, and their values."""
    values, *of_others = (dict(leaves(one.model_dump(mode="json"))) for one in (config, *others))
    return {key: value for key, value in values.items() if any(other[key] != value for other in of_others)}


def _fitting(plan: RunPlan, changes: Iterable[Change], cluster: Cluster) -> RunPlan | None:
    """Return the plan with the fewest of the changes, in their order, that make it fit; None if all do not."""

    def fit(chosen: list[Change]) -> bool:
        return fits(MemoryEstimate(_change(plan, chosen), cluster))

    needed, more = list[Change](), iter(changes)
    while not fit(needed):
        if (change := next(more, None)) is None:
            return None
        needed.append(change)
    for change in reversed(needed[:-1]):  # the last one is needed
        fewer = [one for one in needed if one is not change]
        needed = fewer if fit(fewer) else needed
    return _change(plan, needed)


def _changes(plan: RunPlan) -> Iterator[Change]:
    config, specs = plan.config, plan.components.values()
    if config.rollout.sleep == "never":
        yield _setting("rollout.sleep", "always")
    yield from (offload for _, offload in _offloads(plan))
    yield from (_setting(f"{spec.training.key}.recompute", "full") for spec in specs if spec.training)
    for key, most in dict.fromkeys(spec.max_tokens for spec in specs):
        if most > longest_row(config):
            yield _setting(key, max(most // 2, longest_row(config)))
    for share in reversed(ENGINE_SHARES):
        if share < config.rollout.mem_fraction_static:
            yield _setting(ENGINE_SHARE, share)


def _offloads(plan: RunPlan) -> Iterator[tuple[str, Change]]:
    """Yield the name of a component and the offload of one kind of its tensors, the cheapest first: gradients are freed
    and allocated again, a frozen model's weights are copied once, optimizer states move once per update, a trained
    model's weights most often, the actor's for the sync, too."""
    trained = list(plan.training)
    frozen = [name for name in plan.components if name not in plan.training]
    last = sorted(trained, key=lambda name: name == "actor")
    for kind, names in (("gradients", trained), ("weights", frozen), ("optimizer", last), ("weights", last)):
        for name in names:
            if key := plan.components[name].offload.key:
                yield name, partial(_offload, key, kind)


def _offload(key: str, kind: str, config: Config) -> Config:
    kinds = attrgetter(key)(config)
    return config.changed(key, (*kinds, kind) if kind not in kinds else kinds)


def _setting(key: str, value: object) -> Change:
    return lambda config: config.changed(key, value)


def _change(plan: RunPlan, changes: Iterable[Change]) -> RunPlan:
    config = plan.config
    for change in changes:
        config = change(config)
    return plan.changed(config)
