"""Which component lives on which ranks: from the config's text to layouts. Without torch."""

from collections.abc import Iterable, Iterator

from megappo.config.checks import nearest_divisors
from megappo.config.describe import counted
from megappo.config.errors import ConfigError, shorten
from megappo.config.kinds import MOST_RANKS
from megappo.config.schema import Config, Parallel
from megappo.placement.components import Setting, components_of
from megappo.placement.layout import Layout

TENSOR_OF_ENGINES = "rollout.tensor_parallel"


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Ranks written as `all`, `5`, `0-7` (inclusive), `0-3,6`, in ascending order.

    Raises:
        ValueError: the text is not of this form, a range runs backwards, a rank is named twice or not below world_size.
    """
    if _is_everywhere(text):
        return tuple(range(world_size))
    ranks: set[int] = set()
    for part in text.split(","):
        first, last = _bounds(part, text)
        if last >= world_size:
            raise ValueError(
                f"{_quoted(text)} names rank {last}, but this run has {counted(world_size, 'rank')}, numbered from 0: "
                f"start {last + 1} processes or more (NPROC={last + 1} with launch/local.sh), or name lower ranks"
            )
        for rank in range(first, last + 1):
            if rank in ranks:
                raise ValueError(f"{_quoted(text)} names rank {rank} twice: name it once")
            ranks.add(rank)
    return tuple(sorted(ranks))


def format_ranks(ranks: Iterable[int]) -> str:
    """Ascending ranks as `parse_ranks` reads them: `0-3,6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)


def smallest_world(config: Config) -> int | None:
    """The fewest ranks that the placement can do with; None when every component is on `all` of them.

    Raises:
        ConfigError: a placement is not a list of ranks.
    """
    named, errors = [], []
    for key, text in _texts(config).items():
        try:
            named += [] if _is_everywhere(text) else [_bounds(part, text)[1] + 1 for part in text.split(",")]
        except ValueError as error:
            errors.append(f"{key}: {error}")
    if errors:
        raise ConfigError(*errors)
    return max(named, default=None)


def leaves_world_open(config: Config) -> bool:
    """Whether a component is on all ranks, however many these are."""
    return any(_is_everywhere(text) for text in _texts(config).values())


def placement_layouts(config: Config, world_size: int) -> dict[str, Layout]:
    """Layout of each model of the run, by name, and of the SGLang engines, as `rollout`.

    That has one data-parallel shard per engine; its `output_rank` owns the engine.

    Raises:
        ConfigError: with everything that is wrong in the placement.
    """
    layouts: dict[str, Layout] = {}
    errors: list[str] = []
    placed = _placed(config)
    for name, (ranks, parallel) in placed.items():
        try:
            placed_on = parse_ranks(ranks.value, world_size)
            layouts[name] = _layout(_speakers(placed_on, config) if name == "rollout" else placed_on, *parallel)
        except ValueError as error:
            errors.append(f"{ranks.key}: {error}")
    errors = list(dict.fromkeys(errors))  # components with the same keys have the same errors
    errors += _engine_errors(layouts["rollout"]) if "rollout" in layouts else []
    errors += _cover_errors(layouts, world_size) if len(layouts) == len(placed) else []
    errors += _batch_errors(config, layouts)
    if errors:
        raise ConfigError(*errors)
    return layouts


def _placed(config: Config) -> dict[str, tuple[Setting[str], Setting[Parallel]]]:
    """Ranks and their arrangement: of each model, and of the engines."""
    models = {name: (spec.ranks, spec.parallel) for name, spec in components_of(config).items()}
    tensor = 1 if config.rollout.engines else config.rollout.tensor_parallel
    parallel = Setting(TENSOR_OF_ENGINES, Parallel(tensor=tensor))
    return models | {"rollout": (Setting("placement.rollout", config.placement.rollout), parallel)}


def _speakers(ranks: tuple[int, ...], config: Config) -> tuple[int, ...]:
    """The engines' ranks: of engines elsewhere one each, which speaks to it."""
    count = len(config.rollout.engines)
    if len(ranks) < count:
        raise ValueError(
            f"{_these(len(ranks), format_ranks(ranks))} not suffice for {count} rollout.engines: name "
            f"{count} ranks, one for each, or fewer engines"
        )
    return ranks[:count] if count else ranks


def _texts(config: Config) -> dict[str, str]:
    """By key; components may share one."""
    return {ranks.key: ranks.value for ranks, _ in _placed(config).values()}


def _is_everywhere(text: str) -> bool:
    return text.strip() == "all"


def _bounds(part: str, text: str) -> tuple[int, int]:
    """First and last rank of `5` or `0-7`; `text` is the whole, for the message."""
    first, dash, last = (piece.strip() for piece in part.partition("-"))
    numbers = (first, last) if dash else (first, first)
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(f"{_quoted(text)} is not a list of ranks: write 'all', '0-7', '0,2' or '0-3,6'")
    if any(len(number) > len(str(MOST_RANKS)) or int(number) >= MOST_RANKS for number in numbers):
        raise ValueError(f"{_quoted(text)} names ranks above {MOST_RANKS - 1}: write lower ones")
    if int(numbers[0]) > int(numbers[1]):
        raise ValueError(f"{_quoted(text)}: the range {part.strip()} runs backwards: write {numbers[1]}-{numbers[0]}")
    return int(numbers[0]), int(numbers[1])


def _these(count: int, which: str) -> str:
    """The subject of a sentence about so many ranks, and its verb."""
    return f"the one rank {which} does" if count == 1 else f"the {count} ranks {which} do"


def _quoted(text: str) -> str:
    return shorten(repr(text))


def _layout(ranks: tuple[int, ...], key: str, parallel: Parallel) -> Layout:
    size = parallel.tensor * parallel.context * parallel.pipeline
    if len(ranks) % size:
        context = f" x context {parallel.context}" if parallel.context > 1 else ""
        product = f"{key}'s tensor {parallel.tensor}{context} x pipeline {parallel.pipeline} = {size}"
        product = f"{key} {size}" if key == TENSOR_OF_ENGINES else product
        raise ValueError(
            f"{_these(len(ranks), format_ranks(ranks))} not divide by {product}: "
            f"name {_multiples(len(ranks), size)} ranks, or make it {nearest_divisors(len(ranks), size)}"
        )
    stage = len(ranks) // parallel.pipeline
    experts = parallel.expert * parallel.expert_tensor
    if stage % experts:
        each = f"of each of {key}'s stages (tensor x context x data)"
        raise ValueError(
            f"{_these(stage, each)} not divide by expert "
            f"{parallel.expert} x expert_tensor {parallel.expert_tensor} = {experts}: make it "
            f"{nearest_divisors(stage, experts)}"
        )
    return Layout(ranks, **parallel.model_dump(exclude={"pipeline_split", "sequence"}))


def _multiples(count: int, size: int) -> str:
    below = count // size * size
    return " or ".join(str(number) for number in (below, below + size) if number)


def _engine_errors(rollout: Layout) -> Iterator[str]:
    """An SGLang engine takes GPUs that follow each other."""
    for engine in range(rollout.data):
        ranks = rollout.block(0, engine)
        if ranks[-1] - ranks[0] != len(ranks) - 1:
            yield (
                f"placement.rollout: engine {engine} of rollout.tensor_parallel {rollout.tensor} would get ranks "
                f"{format_ranks(ranks)}, which do not follow each other: name runs of {rollout.tensor} ranks"
            )


def _cover_errors(layouts: dict[str, Layout], world_size: int) -> Iterator[str]:
    used = {rank for layout in layouts.values() for rank in layout.ranks}
    idle = [rank for rank in range(world_size) if rank not in used]
    if idle:
        found, belong = ("rank", "belongs") if len(idle) == 1 else ("ranks", "belong")
        yield (
            f"placement: {found} {format_ranks(idle)} of this run's {world_size} {belong} to no component: "
            f"start {counted(max(used) + 1, 'process')} (NPROC={max(used) + 1} with launch/local.sh), or place a "
            "component there"
        )


def _batch_errors(config: Config, layouts: dict[str, Layout]) -> Iterator[str]:
    """Every data-parallel shard needs a row of every mini-batch."""
    for name, spec in components_of(config).items():
        key, prompts = spec.mini_batch_prompts(config)
        shards = layouts[name].data if name in layouts else 0
        if prompts * config.rollout.n < shards:
            yield (
                f"{key} {prompts} x rollout.n {config.rollout.n} = {prompts * config.rollout.n} trajectories are fewer "
                f"than the {name}'s {shards} data-parallel shards on ranks {format_ranks(layouts[name].ranks)}: "
                f"raise {key} to {-(-shards // config.rollout.n)} or more"
            )
