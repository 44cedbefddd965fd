"""Place the components of a run on its ranks, as the config's text names them. Without torch."""

from collections.abc import Iterator, Mapping

from megappo.config.config_error import ConfigError, counted, nearest_divisors
from megappo.config.schema import Config, Parallel
from megappo.config.values import LARGEST_PORT
from megappo.placement.components import ComponentSpec, components_of
from megappo.placement.layout import Layout
from megappo.placement.ranks import by_node, format_ranks, is_everywhere, parse_ranks, rank_ranges

TENSOR_OF_ENGINES = "rollout.tensor_parallel"


def smallest_world(config: Config) -> int | None:
    """Return the fewest ranks that the placement needs; None if every component is on `all` of them.

    Raises:
        ConfigError: a placement is not a list of ranks.
    """
    last_ranks, errors = [], []
    for key, text in _rank_texts(config).items():
        try:
            last_ranks += [] if is_everywhere(text) else [last for _, last in rank_ranges(text)]
        except ValueError as error:
            errors.append(f"{key}: {error}")
    if errors:
        raise ConfigError(*errors)
    return max(last_ranks) + 1 if last_ranks else None


def leaves_world_open(config: Config) -> bool:
    """Return whether a component is on all ranks of a run of any size."""
    return any(map(is_everywhere, _rank_texts(config).values()))


def _rank_texts(config: Config) -> dict[str, str]:
    """Return the ranks' text by key; components may share a key."""
    found = [spec.ranks for spec in components_of(config).values()]
    return dict([*found, ("placement.rollout", config.placement.rollout)])


def place(config: Config, components: Mapping[str, ComponentSpec], world_size: int) -> dict[str, Layout]:
    """Return the layout of each component, by name, and of the SGLang engines, as `rollout`.

    The layout of the engines has one data-parallel shard per engine, whose `output_rank` owns the engine.

    Raises:
        ConfigError: with every error in the placement.
    """
    layouts: dict[str, Layout] = {}
    errors: list[str] = []
    for name, spec in components.items():
        try:
            layouts[name] = _layout(parse_ranks(spec.ranks.value, world_size), *spec.parallel)
        except ValueError as error:
            errors.append(f"{spec.ranks.key}: {error}")
    try:
        layouts["rollout"] = _engine_layout(config, world_size)
    except ValueError as error:
        errors.append(f"placement.rollout: {error}")
    errors = list(dict.fromkeys(errors))  # components with the same keys have the same errors
    if "rollout" in layouts:
        errors += _engine_errors(layouts["rollout"])
    if len(layouts) == len(components) + 1:
        errors += _idle_errors(layouts, world_size)
    errors += _batch_errors(config, components, layouts)
    if errors:
        raise ConfigError(*errors)
    return layouts


def _engine_layout(config: Config, world_size: int) -> Layout:
    """Return the engines' ranks. Each engine of rollout.engines, which runs already, has one rank that calls it."""
    ranks, count = parse_ranks(config.placement.rollout, world_size), len(config.rollout.engines)
    if not count:
        return _layout(ranks, TENSOR_OF_ENGINES, Parallel(tensor=config.rollout.tensor_parallel))
    if len(ranks) < count:
        raise ValueError(
            f"{_subject(len(ranks), format_ranks(ranks))} not suffice for {count} rollout.engines: name "
            f"{count} ranks, one for each, or fewer engines"
        )
    return Layout(ranks[:count])


def _layout(ranks: tuple[int, ...], key: str, parallel: Parallel) -> Layout:
    size = parallel.tensor * parallel.context * parallel.pipeline
    if len(ranks) % size:
        below = len(ranks) // size * size
        multiples = " or ".join(str(number) for number in (below, below + size) if number)
        raise ValueError(
            f"{_subject(len(ranks), format_ranks(ranks))} not divide by {_product(key, parallel)}: "
            f"name {multiples} ranks, or make it {nearest_divisors(len(ranks), size)}"
        )
    stage = len(ranks) // parallel.pipeline
    experts = parallel.expert * parallel.expert_tensor
    if stage % experts:
        which = f"of each of {key}'s stages (tensor x context x data)"
        raise ValueError(
            f"{_subject(stage, which)} not divide by expert {parallel.expert} x expert_tensor "
            f"{parallel.expert_tensor} = {experts}: make it {nearest_divisors(stage, experts)}"
        )
    return Layout(ranks, **parallel.model_dump(exclude={"pipeline_split", "sequence"}))


def _product(key: str, parallel: Parallel) -> str:
    size = parallel.tensor * parallel.context * parallel.pipeline
    if key == TENSOR_OF_ENGINES:
        return f"{key} {size}"
    context = f" x context {parallel.context}" if parallel.context > 1 else ""
    return f"{key}'s tensor {parallel.tensor}{context} x pipeline {parallel.pipeline} = {size}"


def _subject(count: int, which: str) -> str:
    """Return the subject of a sentence about ranks, with its verb."""
    return f"the one rank {which} does" if count == 1 else f"the {count} ranks {which} do"


def _engine_errors(rollout: Layout) -> Iterator[str]:
    """Check that the GPUs of each SGLang engine follow each other."""
    for engine in range(rollout.data):
        ranks = rollout.block(0, engine)
        if ranks[-1] - ranks[0] != len(ranks) - 1:
            yield (
                f"placement.rollout: engine {engine} of {TENSOR_OF_ENGINES} {rollout.tensor} would get ranks "
                f"{format_ranks(ranks)}, which do not follow each other: name runs of {rollout.tensor} ranks"
            )


def _idle_errors(layouts: Mapping[str, Layout], world_size: int) -> Iterator[str]:
    used = {rank for layout in layouts.values() for rank in layout.ranks}
    idle = [rank for rank in range(world_size) if rank not in used]
    if idle:
        found, belong = ("rank", "belongs") if len(idle) == 1 else ("ranks", "belong")
        yield (
            f"placement: {found} {format_ranks(idle)} of this run's {world_size} {belong} to no component: "
            f"start {counted(max(used) + 1, 'process')} (NPROC={max(used) + 1} with launch/local.sh), or place a "
            "component there"
        )


def _batch_errors(
    config: Config, components: Mapping[str, ComponentSpec], layouts: Mapping[str, Layout]
) -> Iterator[str]:
    """Check that every data-parallel shard gets a row of every mini-batch."""
    for name, spec in components.items():
        key, prompts = spec.mini_batch_prompts(config)
        rows, shards = prompts * config.rollout.n, layouts[name].data if name in layouts else 0
        if rows < shards:
            yield (
                f"{key} {prompts} x rollout.n {config.rollout.n} = {rows} trajectories are fewer "
                f"than the {name}'s {shards} data-parallel shards on ranks {format_ranks(layouts[name].ranks)}: "
                f"raise {key} to {-(-shards // config.rollout.n)} or more"
            )


def node_errors(config: Config, rollout: Layout, ranks_per_node: int) -> Iterator[str]:
    """Check engines against nodes: SGLang needs as many ranks of an engine on each of its nodes, and the engines of a
    node use consecutive ports from rollout.port on."""
    for engine in range(rollout.data):
        ranks = rollout.block(0, engine)
        sizes = [len(part) for part in by_node(ranks, ranks_per_node)]
        if len(set(sizes)) > 1:
            yield (
                f"placement.rollout: engine {engine} of {TENSOR_OF_ENGINES} {rollout.tensor} would get ranks "
                f"{format_ranks(ranks)}, {' and '.join(map(str, sizes))} on its nodes of {ranks_per_node} ranks: make "
                f"{TENSOR_OF_ENGINES} a divisor or a multiple of {ranks_per_node}, and start placement.rollout on a "
                "multiple of that"
            )
    port, largest_node = config.rollout.port, max(map(len, by_node(rollout.ranks, ranks_per_node)))
    engines = -(-largest_node // rollout.tensor)
    if port + engines - 1 > LARGEST_PORT:
        yield (
            f"rollout.port {port} is too high for the {engines} engines of a node, which take as many ports: lower it "
            f"to {LARGEST_PORT + 1 - engines} or less"
        )
