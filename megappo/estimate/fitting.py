"""Making a run fit its GPUs: what `auto` stands for, and what to change where a run does not fit."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce

from megappo.config.checks import longest_request, longest_row
from megappo.config.loading import leaves
from megappo.config.schema import Config
from megappo.estimate.memory import Cluster, MemoryEstimate
from megappo.placement.components import components_of

AUTO = "auto"
SPARE = 0.05
"""Share of a GPU that the estimate leaves free: allocators fragment, and it is no more than an estimate."""
ENGINE_SHARES = tuple(number / 10 for number in range(1, 10))
Change = Callable[[Config], Config]


def settled(config: Config, cluster: Cluster | None) -> Config:
    """The config with every `offload: auto` replaced by as little as makes the run fit, or, if nothing does, by all;
    then `rollout.sleep: auto` by "never" if the run fits with that, too.

    Args:
        cluster: None without GPUs, where nothing has to be offloaded, and no engine sleeps.
    """
    config = _with_settled_offloads(config, cluster)
    if config.rollout.sleep != AUTO:
        return config
    awake = config.changed("rollout.sleep", "never")
    stays_awake = cluster is not None and fits(MemoryEstimate(awake, cluster))
    return awake if stays_awake else config.changed("rollout.sleep", "always")


def _with_settled_offloads(config: Config, cluster: Cluster | None) -> Config:
    unsettled = {name: spec.offload.key for name, spec in components_of(config).items() if spec.offload.value == AUTO}
    config = _changed(config, (_setting(key, ()) for key in unsettled.values()))
    if cluster is None or not unsettled:
        return config
    offloads = [offload for name, offload in _offloads(config) if name in unsettled]
    return _fitting(config, offloads, cluster) or _changed(config, offloads)


def settled_lines(asked: Config, config: Config) -> Iterator[str]:
    """What each `auto` has become, a line each."""
    if asked.rollout.sleep == AUTO:
        yield f"rollout.sleep auto: {config.rollout.sleep}"
    for name, spec in components_of(asked).items():
        if spec.offload.value == AUTO:
            kinds = components_of(config)[name].offload.value
            yield f"{spec.offload.key} auto: {', '.join(kinds) or 'nothing'}"


def fits(estimate: MemoryEstimate) -> bool:
    """Whether every GPU has SPARE left in every phase, and the engines room for one row at least."""
    most, _ = estimate.peak(estimate.fullest)
    return most <= (1 - SPARE) * estimate.cluster.gpu_bytes and _has_room(estimate)


def _has_room(estimate: MemoryEstimate) -> bool:
    is_elsewhere = bool(estimate.config.rollout.engines)  # on GPUs that nothing is known of
    return is_elsewhere or estimate.engine.cache_tokens >= longest_request(estimate.config)


def remedies(config: Config, cluster: Cluster) -> dict[str, object] | None:
    """Keys and values with which a run that does not fit would; None if none of these help.

    An engine without room for a row gets a larger share of the GPU first. Of the rest, what costs least comes first:
    gradients, which are freed, other offloads, recomputation, smaller micro-batches, a smaller engine.
    """
    for roomy in _with_room(config, cluster):
        if (fitting := _fitting(roomy, _changes(roomy), cluster)) is not None:
            return differences(fitting, config)
    return None


def _with_room(config: Config, cluster: Cluster) -> list[Config]:
    """The config if its engines have room for a row, else with those larger shares of the GPU with which they have."""
    if _has_room(MemoryEstimate(config, cluster)):
        return [config]
    larger = [share for share in ENGINE_SHARES if share > config.rollout.mem_fraction_static]
    changed = [config.changed("rollout.mem_fraction_static", share) for share in larger]
    return [one for one in changed if _has_room(MemoryEstimate(one, cluster))]


def differences(config: Config, *others: Config) -> dict[str, object]:
    """The keys whose values are not those of all others, and their values."""
    values, *of_others = (dict(leaves(one.model_dump(mode="json"))) for one in (config, *others))
    return {key: value for key, value in values.items() if any(other[key] != value for other in of_others)}


def _fitting(config: Config, changes: Iterable[Change], cluster: Cluster) -> Config | None:
    """The config with the first of the changes that make it fit, but for those it fits without; None if all do not."""

    def fit(chosen: list[Change]) -> bool:
        return fits(MemoryEstimate(_changed(config, chosen), cluster))

    needed, more = list[Change](), iter(changes)
    while not fit(needed):
        if (change := next(more, None)) is None:
            return None
        needed.append(change)
    for change in reversed(needed[:-1]):  # the last one is needed
        fewer = [one for one in needed if one is not change]
        needed = fewer if fit(fewer) else needed
    return _changed(config, needed)


def _changes(config: Config) -> Iterator[Change]:
    specs = components_of(config).values()
    if config.rollout.sleep == "never":
        yield _setting("rollout.sleep", "always")
    yield from (offload for _, offload in _offloads(config))
    yield from (_setting(f"{spec.training.key}.recompute", "full") for spec in specs if spec.training)
    for key, most in dict.fromkeys(spec.max_tokens for spec in specs):
        if most > longest_row(config):
            yield _setting(key, max(most // 2, longest_row(config)))
    for share in reversed(ENGINE_SHARES):
        if share < config.rollout.mem_fraction_static:
            yield _setting("rollout.mem_fraction_static", share)


def _offloads(config: Config) -> Iterator[tuple[str, Change]]:
    """One kind of one component at a time, and its name, the cheapest first: gradients are freed and made anew, a
    frozen model's weights need not be saved again, optimizer states move once per update, a trained model's weights
    most often, the actor's for the sync, too."""
    specs = components_of(config)
    trained = [name for name, spec in specs.items() if spec.training]
    frozen = [name for name, spec in specs.items() if not spec.training]
    last = sorted(trained, key=lambda name: name == "actor")
    for kind, names in (("gradients", trained), ("weights", frozen), ("optimizer", last), ("weights", last)):
        yield from ((name, partial(_offloaded, name, kind)) for name in names)


def _offloaded(name: str, kind: str, config: Config) -> Config:
    key, kinds = components_of(config)[name].offload
    return config.changed(key, tuple(dict.fromkeys((*kinds, kind))))


def _setting(key: str, value: object) -> Change:
    return lambda config: config.changed(key, value)


def _changed(config: Config, changes: Iterable[Change]) -> Config:
    return reduce(lambda changed, change: change(changed), changes, config)
