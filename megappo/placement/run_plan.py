"""The plan of a run: computed once, before anything is built, by a dry run and by the run itself. Without torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megappo.config.checks import config_errors
from megappo.config.config_error import ConfigError, Errors, counted, nearest_divisors, shorten
from megappo.config.eval_sets import longest_unit
from megappo.config.model_sections import Optim
from megappo.config.schema import Config
from megappo.config.sections import Parallel
from megappo.placement.components import AUTO, ComponentSpec, Specs, Training, components_of
from megappo.placement.layout import Layouts, format_ranks
from megappo.placement.placing import place
from megappo.placement.route import SyncRoute, find_route

SHORTEST_ROW = 2
"""Tokens of the shortest trajectory: a prompt of one, a response of one."""


@dataclass(frozen=True)
class BatchSplit:
    """One component's split of a step's trajectories into mini-batches and micro-batches.

    Attributes:
        mini_batches: mini-batches per epoch; 1 for a component that only computes log-probs.
        epochs: passes over the trajectories; 0 for a component that is not trained.
        trajectories: trajectories of one mini-batch that it trains on, over all shards.
        shard_trajectories: fewest and most trajectories of one mini-batch per data-parallel shard. Shards are balanced
            by tokens, so these are approximate.
        micro_batches: micro-batches of one mini-batch per shard: if all rows are shortest, and longest.
    """

    mini_batches: int
    epochs: int
    trajectories: int
    shard_trajectories: tuple[int, int]
    micro_batches: tuple[int, int]

    @property
    def optimizer_steps(self) -> int:
        """Per PPO step."""
        return self.mini_batches * self.epochs


@dataclass(frozen=True)
class RunPlan:
    """Everything that follows from a config and a number of ranks alone.

    Attributes:
        requested: the config as the user wrote it.
        config: the same; after `lab.estimate.fitting.resolve_offload` without any `auto` in offloads and rollout.sleep.
        world_size: ranks of the run.
        ranks_per_node: ranks on each node.
        components: the models, by name.
        layouts: the ranks of each model, by name, and of the SGLang engines, as `rollout`.
    """

    requested: Config
    config: Config
    world_size: int
    ranks_per_node: int
    components: Specs
    layouts: Layouts

    @cached_property
    def route(self) -> SyncRoute:
        """The route of the actor's weights to each engine."""
        return find_route(self.config, self.layouts, self.ranks_per_node)

    @cached_property
    def training(self) -> dict[str, Training]:
        """The training of each trained model, by name."""
        found = {name: spec.training for name, spec in self.components.items()}
        return {name: training for name, training in found.items() if training is not None}

    @cached_property
    def batch_splits(self) -> dict[str, BatchSplit]:
        """Each component's split of a step's trajectories, by name."""
        splits = {}
        config = self.config
        for name, spec in self.components.items():
            mini_batch = spec.mini_batch_prompts(config).value
            layout = self.layouts[name]
            max_tokens = spec.max_tokens
            trajectories = mini_batch * config.rows_per_prompt // spec.members
            group = layout.micro_batch_group
            fewest = trajectories // layout.data
            most = _ceil(trajectories, layout.data)
            if_shortest = _ceil(fewest * SHORTEST_ROW, max_tokens.value)
            if_longest = _ceil(most, max_tokens.value // longest_unit(config) * config.rows_together)
            splits[name] = BatchSplit(
                mini_batches=config.data.train_batch_size // mini_batch,
                epochs=spec.training.epochs if spec.training else 0,
                trajectories=trajectories,
                shard_trajectories=(fewest, most),
                micro_batches=(_ceil(if_shortest, group) * group, _ceil(if_longest, group) * group),
            )
        return splits

    def changed(self, config: Config) -> "RunPlan":
        """Return the plan with a config that places everything on the same ranks."""
        return replace(self, config=config, components=components_of(config))

    def sleep_errors(self, *, on_gpus: bool) -> Errors:
        """Yield why engines cannot sample while the models train. Such a plan has estimates and suggestions."""
        if not self.config.recipe.has_rollouts or not self.config.rollout.runs_ahead:
            return
        ahead = f"rollout.max_staleness {self.config.rollout.max_staleness}"
        shared = [rank for engine in self.route.engines if engine.shares_gpus for rank in engine.ranks]
        if shared and self.config.rollout.sleep != "never":
            yield (
                f"with {ahead} the engines sample while the models train, but engines on the GPUs of ranks "
                f"{format_ranks(shared)} sleep then: give placement.rollout ranks of its own, or set rollout.sleep to "
                "never"
            )
        elif shared and on_gpus and self.world_size > 1:
            yield (
                f"rollout.sleep never: with {ahead}, engines and models compute at once on the GPUs of ranks "
                f"{format_ranks(shared)}. A GPU gives them turns without regard to other GPUs, so collectives wait for "
                "each other; nobody has measured how long: give placement.rollout ranks of its own, or set "
                "rollout.max_staleness to 0"
            )

    def decisions(self) -> Iterator[str]:
        """Yield the value that each `auto` has become, a line each."""
        if self.requested.rollout.sleep == AUTO:
            yield f"rollout.sleep auto: {self.config.rollout.sleep}"
        for (key, value), name in {spec.offload: name for name, spec in components_of(self.requested).items()}.items():
            if value == AUTO:
                kinds = self.components[name].offload.value
                yield f"{key} auto: {', '.join(kinds) or 'nothing'}"


def plan_run(config: Config, world_size: int, ranks_per_node: int | None = None) -> RunPlan:
    """Return the plan of a run. Opens no file.

    Args:
        ranks_per_node: None if all ranks are on one node.
    Raises:
        ConfigError: with every contradiction between keys, placement, layouts, batch and engines.
    """
    components = components_of(config)
    ranks_per_node = ranks_per_node or world_size
    errors = [*_component_errors(config, components), *config_errors(config)]
    try:
        layouts = place(config, components, world_size, ranks_per_node)
    except ConfigError as error:
        raise ConfigError(*errors, *error.errors) from None
    plan = RunPlan(config, config, world_size, ranks_per_node, components, layouts)
    errors += plan.route.errors(on_gpus=False) if config.recipe.has_rollouts else ()
    if absent := [rank for rank in config.trainer.profile.ranks if rank >= world_size]:
        errors.append(
            f"trainer.profile.ranks {absent[0]} is not below the number of ranks, {world_size}: choose another"
        )
    if errors:
        raise ConfigError(*errors)
    return plan


def _component_errors(config: Config, components: Specs) -> list[str]:
    """Return every contradiction between the keys of components, one line each, with their values and the remedy."""
    errors: list[str] = []
    for spec in components.values():
        errors += _batch_errors(config, spec)
        errors += _parallel_errors(*spec.parallel)
        errors += _optimizer_errors(config, spec.training) if spec.training else []
        if spec.base and spec.training is None and spec.offload.value not in ((), AUTO):
            errors.append(
                f"{spec.offload.key} {', '.join(spec.offload.value)} has no effect on weights that are the "
                f"{spec.base}'s: drop it, or set {components[spec.base].offload.key}"
            )
    return list(dict.fromkeys(errors))  # components may share keys


def _batch_errors(config: Config, spec: ComponentSpec) -> Errors:
    prompts = config.data.train_batch_size
    (key, size) = spec.mini_batch_prompts(config)
    if prompts % size:
        yield f"{key} {size} does not divide data.train_batch_size {prompts}: {nearest_divisors(prompts, size)} would"
    key, max_tokens = spec.max_tokens
    if max_tokens < longest_unit(config):
        length = f"data.max_length {config.data.max_length}"
        if config.recipe.has_rollouts:
            length = (
                f"data.max_prompt_length {config.data.max_prompt_length} + rollout.max_response_length "
                f"{config.rollout.max_response_length}"
            )
        unit = "both rows of a pair, each" if config.recipe.has_pairs else "one row"
        yield f"{key} {max_tokens} cannot hold {unit} of {length}: set it to {longest_unit(config)} or more"


def _parallel_errors(key: str, parallel: Parallel) -> Errors:
    split = parallel.pipeline_split
    if split is not None and len(split) != parallel.num_chunks:
        found = f"{shorten(str(list(split)))} is of {counted(len(split), 'chunk')}"
        yield (
            f"{key}.pipeline_split {found}, but {key}.pipeline {parallel.pipeline} x virtual_pipeline "
            f"{parallel.virtual_pipeline} = {parallel.num_chunks}: name the layers of each, or drop it"
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        yield (
            f"{key}.virtual_pipeline {parallel.virtual_pipeline} needs {key}.pipeline > 1, found 1: raise pipeline, or "
            "drop it"
        )
    if parallel.sequence and parallel.tensor == 1:
        yield f"{key}.sequence needs {key}.tensor > 1, found 1: raise tensor or turn sequence off"


def _optimizer_errors(config: Config, training: Training) -> Errors:
    key = f"{training.key}.optim"
    optim = training.settings.optim
    steps = training.optimizer_steps(config)
    if optim.min_lr > optim.lr:
        yield f"{key}.min_lr {optim.min_lr} is above {key}.lr {optim.lr}: lower it"
    if optim.min_lr and optim.lr_decay_style == "constant":
        yield (
            f"{key}.min_lr {optim.min_lr} has no effect with lr_decay_style constant: "
            "choose linear or cosine, or drop min_lr"
        )
    if steps and optim.lr_warmup_steps >= steps:
        yield (
            f"{key}.lr_warmup_steps {optim.lr_warmup_steps} must be below the run's "
            f"{counted(steps, 'optimizer step')}: shorten it or raise trainer.total_steps"
        )
    yield from _compact_errors(key, optim)


def _compact_errors(key: str, optim: Optim) -> Errors:
    """Yield what moments in bf16, or states in host memory, do not go together with.

    bf16 has 8 binary digits, so that a moment times more than 1 - 2^-8 may be rounded to the moment itself: it would
    grow, and never decay.
    """
    if not optim.is_compact:
        return
    setting = f"{key}.moments_dtype bf16" if optim.moments_dtype != "fp32" else f"{key}.offload_fraction above 0"
    if not optim.distributed:
        yield f"{setting} needs Megatron's distributed optimizer: set {key}.distributed to true"
    if optim.moments_dtype == "bf16" and max(optim.betas) > 1 - 2**-8:
        yield (
            f"{key}.betas {', '.join(map(str, optim.betas))} with {setting}: a moment that decays by less than 1/256 a "
            "step is rounded back to itself and never decays: lower it to 0.996, or set moments_dtype to fp32"
        )


def _ceil(number: int, size: int) -> int:
    return -(-number // size)
