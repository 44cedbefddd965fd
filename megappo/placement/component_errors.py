"""Check the keys of a run's components against each other, without a world size or a file. Without torch."""

from collections.abc import Iterator, Mapping

from megappo.config.config_error import counted, nearest_divisors, shorten
from megappo.config.eval_sets import longest_row
from megappo.config.schema import Config, Parallel
from megappo.placement.components import ComponentSpec, Training


def component_errors(config: Config, components: Mapping[str, ComponentSpec]) -> list[str]:
    """Return every contradiction, one line each, with the keys, their values and the remedy."""
    errors: list[str] = []
    for spec in components.values():
        errors += _batch_errors(config, spec)
        errors += _parallel_errors(*spec.parallel)
        errors += _optimizer_errors(config, spec.training) if spec.training else []
    return list(dict.fromkeys(errors))  # components may share keys


def _batch_errors(config: Config, spec: ComponentSpec) -> Iterator[str]:
    prompts, (key, size) = config.data.train_batch_size, spec.mini_batch_prompts(config)
    if prompts % size:
        yield f"{key} {size} does not divide data.train_batch_size {prompts}: {nearest_divisors(prompts, size)} would"
    key, max_tokens = spec.max_tokens
    if max_tokens < longest_row(config):
        yield (
            f"{key} {max_tokens} cannot hold one row of data.max_prompt_length {config.data.max_prompt_length} + "
            f"rollout.max_response_length {config.rollout.max_response_length}: set it to {longest_row(config)} or more"
        )


def _parallel_errors(key: str, parallel: Parallel) -> Iterator[str]:
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


def _optimizer_errors(config: Config, training: Training) -> Iterator[str]:
    key, optim, steps = f"{training.key}.optim", training.section.optim, training.optimizer_steps(config)
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
