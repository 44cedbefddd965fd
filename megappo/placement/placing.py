"""Place the components of a run on its ranks, as the config's text names them. Without torch."""

from megappo.config.config_error import ConfigError, Errors
from megappo.config.schema import Config
from megappo.config.sections import Parallel
from megappo.config.values import LARGEST_PORT
from megappo.placement.components import Setting, Specs, components_of
from megappo.placement.layout import Layout, Layouts, by_node, format_ranks, is_everywhere, parse_ranks, rank_ranges


def smallest_world(config: Config) -> int | None:
    """Return the fewest ranks that the placement needs; None if every component is on `all` of them.

    Raises:
        ConfigError: a placement is not a list of ranks.
    """
    world_size = 0
    errors = []
    for key, text in _rank_texts(config).items():
        if is_everywhere(text):
            continue
        try:
            world_size = max(world_size, *(last + 1 for _, last in rank_ranges(text)))
        except ValueError as error:
            errors.append(f"{key}: {error}")
    if errors:
        raise ConfigError(*errors)
    return world_size or None


def leaves_world_open(config: Config) -> bool:
    """Return whether a component is on all ranks of a run of any size."""
    return any(map(is_everywhere, _rank_texts(config).values()))


def _rank_texts(config: Config) -> dict[str, str]:
    """Return the ranks' text by key; components may share a key."""
    found = [spec.ranks for spec in components_of(config).values()]
    engines = [("placement.rollout", config.placement.rollout)] if config.recipe.has_rollouts else []
    return dict([*found, *engines])


def place(
    config: Config,
    components: Specs,
    world_size: int,
    ranks_per_node: int,
) -> dict[str, Layout]:
    """Return the layout of each component, by name, and with rollouts the layout of the SGLang engines, as `rollout`.

    The layout of the engines has one data-parallel shard per engine, whose `output_rank` owns the engine. Each engine
    of rollout.engines, which runs already, has one rank that calls it.

    Raises:
        ConfigError: with every error in the placement.
    """
    external = len(config.rollout.engines)
    rollout = config.placement.rollout
    engines = Parallel(tensor=1 if external else config.rollout.tensor_parallel)
    placed = {name: (spec.ranks, spec.parallel) for name, spec in components.items()}
    if config.recipe.has_rollouts:
        placed["rollout"] = Setting("placement.rollout", rollout), Setting("rollout.tensor_parallel", engines)
    layouts: dict[str, Layout] = {}
    errors: list[str] = []
    for name, (text, parallel) in placed.items():
        at = text.key
        try:
            ranks = parse_ranks(text.value, world_size)
            if name == "rollout" and external:
                ranks = ranks[:external]
            at = f"{text.key} with {parallel.key}"
            layouts[name] = Layout(
                ranks, **parallel.value.model_dump(exclude={"pipeline_split", "sequence", "dispatcher"})
            )
        except ValueError as error:
            errors.append(f"{at}: {error}")
    errors = list(dict.fromkeys(errors))  # components with the same keys have the same errors
    if "rollout" in layouts:
        errors += _engine_errors(config, layouts["rollout"], ranks_per_node)
    if layouts.keys() == placed.keys():
        errors += _idle_errors(layouts, world_size)
    errors += _batch_errors(config, components, layouts)
    if errors:
        raise ConfigError(*errors)
    return layouts


def _engine_errors(config: Config, rollout: Layout, ranks_per_node: int) -> Errors:
    """Check the ranks of engines: each engine's follow each other, and SGLang needs equally many on each of its
    nodes."""
    external = len(config.rollout.engines)
    if rollout.data < external:
        yield (
            f"placement.rollout: the ranks {format_ranks(rollout.ranks)} do not suffice for {external} "
            "rollout.engines: name one for each, or fewer engines"
        )
    on_fullest_node = max(map(len, by_node(rollout.ranks, ranks_per_node)))
    largest_port = LARGEST_PORT + 1 - max(1, on_fullest_node // rollout.tensor)
    if config.rollout.port > largest_port:
        yield (
            f"rollout.port {config.rollout.port} is too high: each engine of a node takes one port more; lower it to "
            f"{largest_port} or less"
        )
    for engine in range(rollout.data):
        ranks = rollout.block(0, engine)
        per_node = {len(part) for part in by_node(ranks, ranks_per_node)}
        if ranks[-1] - ranks[0] != len(ranks) - 1 or len(per_node) > 1:
            yield (
                f"placement.rollout: engine {engine} of rollout.tensor_parallel {rollout.tensor} would get ranks "
                f"{format_ranks(ranks)}: name ranks that follow each other, equally many on each of its nodes of "
                f"{ranks_per_node}"
            )


def _idle_errors(layouts: Layouts, world_size: int) -> Errors:
    used = {rank for layout in layouts.values() for rank in layout.ranks}
    idle = [rank for rank in range(world_size) if rank not in used]
    if idle:
        yield (
            f"placement: ranks {format_ranks(idle)} of this run's {world_size} belong to no component: place one "
            "there, or start fewer processes (--nproc of megappo train, NPROC of the launch scripts)"
        )


def _batch_errors(config: Config, components: Specs, layouts: Layouts) -> Errors:
    """Check that every data-parallel shard gets a row of every mini-batch."""
    for name, layout in layouts.items():
        if name == "rollout":
            continue
        key, prompts = components[name].mini_batch_prompts(config)
        rows = prompts * config.rollout.n
        members = components[name].members
        shards = layout.data
        what = f"{rows} examples"
        if config.recipe.has_rollouts:
            what = f"{prompts} x rollout.n {config.rollout.n} = {rows} trajectories"
        if members > 1:
            what += f" / critic.ensemble {members} = {rows // members}"
        if rows // members < shards:
            yield (
                f"{key} {what} are fewer than the {name}'s {shards} data-parallel shards on ranks "
                f"{format_ranks(layout.ranks)}: raise {key} to {-(-shards * members // config.rollout.n)} or more"
            )
