"""Making a run fit its GPUs: what `offload: auto` stands for, and what to change where a run does not fit."""

from collections.abc import Callable, Collection, Iterator

from megappo.config.checks import longest_row
from megappo.config.loading import leaves
from megappo.config.schema import Config, TensorKind
from megappo.estimate.memory import MemoryEstimate
from megappo.estimate.shapes import Shapes
from megappo.placement.components import components_of

AUTO = "auto"
SPARE = 0.05
"""Share of a GPU that the estimate leaves free: allocators fragment, and it is no more than an estimate."""
SMALLEST_ENGINE_SHARE, ENGINE_SHARE_STEP = 0.2, 0.1
Change = Callable[[Config], Config]


def settled(config: Config, world_size: int, gpu_bytes: float | None, shapes: Shapes | None = None) -> Config:
    """The config with every `offload: auto` replaced by as little as makes the run fit, or, if nothing does, by all.

    Args:
        gpu_bytes: what a program can have of each GPU; None without GPUs, where nothing has to be offloaded.
    """
    specs = components_of(config)
    open_keys = {spec.offload.key for spec in specs.values() if spec.offload.value == AUTO}
    for key in open_keys:
        config = config.changed(key, ())
    if gpu_bytes is None or not open_keys:
        return config
    shapes = shapes or Shapes()
    for more in (lambda one: one, *_offloads(config, open_keys)):
        config = more(config)
        if fits(MemoryEstimate(config, world_size, gpu_bytes, shapes)):
            break
    return config


def settled_offloads(asked: Config, config: Config) -> Iterator[str]:
    """What each `offload: auto` has become, a line each."""
    for name, spec in components_of(asked).items():
        if spec.offload.value == AUTO:
            kinds = components_of(config)[name].offload.value
            yield f"{spec.offload.key} auto: {', '.join(kinds) or 'nothing'}"


def fits(estimate: MemoryEstimate) -> bool:
    """Whether every GPU has SPARE left in every phase, and the engines room for one row at least."""
    return estimate.peak()[0] <= (1 - SPARE) * estimate.gpu_bytes and estimate.cache_tokens() >= longest_row(
        estimate.config
    )


def remedies(config: Config, world_size: int, gpu_bytes: float, shapes: Shapes) -> dict[str, object] | None:
    """Keys and values with which a run that does not fit would; {} for one that fits, None if none of these help.

    What costs least comes first: gradients, which are freed, other offloads, recomputation, smaller micro-batches, a
    smaller engine.
    """

    def fit(changes: Collection[Change]) -> bool:
        return fits(MemoryEstimate(_changed(config, changes), world_size, gpu_bytes, shapes))

    needed: list[Change] = []
    changes = _changes(config)
    while not fit(needed):
        change = next(changes, None)
        if change is None:
            return None
        needed.append(change)
    for change in tuple(needed):
        others = [one for one in needed if one is not change]
        needed = others if fit(others) else needed
    before, after = (dict(leaves(one.model_dump(mode="json"))) for one in (config, _changed(config, needed)))
    return {key: value for key, value in after.items() if before[key] != value}


def _changes(config: Config) -> Iterator[Change]:
    keys = {spec.offload.key for spec in components_of(config).values()} - {""}
    yield from _offloads(config, keys)
    for name, spec in components_of(config).items():
        if spec.training and spec.training.section.recompute != "full":
            yield _setting(f"{name}.recompute", "full")
    tokens = {spec.max_tokens for spec in components_of(config).values()}
    for key, most in tokens:
        if most > longest_row(config):
            yield _setting(key, max(most // 2, longest_row(config)))
    share = config.rollout.mem_fraction_static - ENGINE_SHARE_STEP
    while share >= SMALLEST_ENGINE_SHARE - 1e-9:
        yield _setting("rollout.mem_fraction_static", round(share, 2))
        share -= ENGINE_SHARE_STEP


def _offloads(config: Config, keys: Collection[str]) -> Iterator[Change]:
    """One kind of one component at a time, the cheapest first: gradients are freed and made anew, a frozen model's
    weights need not be saved again, optimizer states move once per update, a trained model's weights most often."""
    specs = [spec for spec in components_of(config).values() if spec.offload.key in keys]
    trained = [spec.offload.key for spec in specs if spec.training]
    frozen = [spec.offload.key for spec in specs if not spec.training]
    last = sorted(trained, key=lambda key: key == "actor.offload")  # needed by the sync, too
    order: list[tuple[str, TensorKind]] = [(key, "gradients") for key in trained]
    order += [(key, "weights") for key in frozen]
    order += [(key, "optimizer") for key in last] + [(key, "weights") for key in last]
    for key, kind in order:
        yield _adding(key, kind)


def _setting(key: str, value: object) -> Change:
    return lambda config: config.changed(key, value)


def _adding(key: str, kind: TensorKind) -> Change:
    def add(config: Config) -> Config:
        section = getattr(config, key.split(".")[0])
        return config.changed(key, tuple(dict.fromkeys((*section.offload, kind))))

    return add


def _changed(config: Config, changes: Collection[Change]) -> Config:
    for change in changes:
        config = change(config)
    return config
