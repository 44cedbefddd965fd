"""Keys that contradict each other: what can be told without a world size and without opening a file."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from megappo.config.algorithm_checks import algorithm_errors
from megappo.config.describe import counted
from megappo.config.errors import shorten
from megappo.config.schema import Config, Optim, Parallel, Trained

MOST_DIVISORS_TRIED = 10**6


def config_errors(config: Config) -> list[str]:
    """Every contradiction, one line each, naming the keys, their values and the remedy."""
    return [
        *_trained(config, "actor", config.actor),
        *(_trained(config, "critic", config.critic) if config.has_critic else ()),
        *algorithm_errors(config),
        *_reference(config),
        *_rollout(config),
        *_data(config),
    ]


def optimizer_steps(config: Config, name: Literal["actor", "critic"]) -> int:
    """Optimizer steps of a trained component over the whole run; early stops of a step aside."""
    trained: Trained = getattr(config, name)
    steps = config.trainer.total_steps - (config.critic.warmup_steps if name == "actor" else 0)
    return steps * trained.ppo_epochs * config.num_mini_batches(name)


def longest_row(config: Config) -> int:
    """Tokens a prompt and its response may have together."""
    return config.data.max_prompt_length + config.rollout.max_response_length


def context_errors(config: Config, key: str, limit: int, remedy: str) -> Iterator[str]:
    """An error if `limit` tokens, set by `key`, are too few for an engine: it would cut responses or refuse prompts.

    Source: SGLang 0.5.23, scheduler.py and tp_worker.py: a response gets at most limit - prompt - 2 tokens, and prompts
    of limit - 6 tokens or more are refused.
    """
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    needed = max(prompt + response + 2, prompt + 7)
    if limit < needed:
        yield (
            f"{key} {limit} is below the {needed} tokens that an engine needs for data.max_prompt_length {prompt} and "
            f"rollout.max_response_length {response} (their sum + 2, and the prompt + 7): {remedy}"
        )


def nearest_divisors(number: int, size: int) -> str:
    """The divisors of `number` just below and above `size`, for advice; of huge numbers, among those quickly found."""
    small = [divisor for divisor in range(1, min(math.isqrt(number), MOST_DIVISORS_TRIED) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    below = [divisor for divisor in divisors if divisor < size][-1:]
    above = [divisor for divisor in divisors if divisor > size][:1]
    return " or ".join(map(str, below + above))


def _trained(config: Config, name: Literal["actor", "critic"], trained: Trained) -> Iterator[str]:
    yield from _mini_batch(config, name, trained)
    yield from _micro_batch(config, f"{name}.max_tokens_per_micro_batch", trained.max_tokens_per_micro_batch)
    yield from _parallel(f"{name}.parallel", trained.parallel)
    yield from _learning_rate(f"{name}.optim", trained.optim)
    steps = optimizer_steps(config, name)
    if steps and trained.optim.lr_warmup_steps >= steps:
        yield (
            f"{name}.optim.lr_warmup_steps {trained.optim.lr_warmup_steps} must be below the run's "
            f"{counted(steps, 'optimizer step')}: shorten it or raise trainer.total_steps"
        )


def _mini_batch(config: Config, name: str, trained: Trained) -> Iterator[str]:
    prompts, size = config.data.train_batch_size, trained.ppo_mini_batch_size
    if prompts % size:
        yield (
            f"{name}.ppo_mini_batch_size {size} does not divide data.train_batch_size {prompts}: "
            f"{nearest_divisors(prompts, size)} would"
        )


def _micro_batch(config: Config, key: str, max_tokens: int) -> Iterator[str]:
    if max_tokens < longest_row(config):
        yield (
            f"{key} {max_tokens} cannot hold one row of data.max_prompt_length {config.data.max_prompt_length} + "
            f"rollout.max_response_length {config.rollout.max_response_length}: set it to {longest_row(config)} or more"
        )


def _parallel(key: str, parallel: Parallel) -> Iterator[str]:
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


def _learning_rate(key: str, optim: Optim) -> Iterator[str]:
    if optim.lr >= 1:
        yield f"{key}.lr {optim.lr} is what Adam would change every weight by in a step: lower it, to 1e-4 or less"
    if optim.min_lr > optim.lr:
        yield f"{key}.min_lr {optim.min_lr} is above {key}.lr {optim.lr}: lower it"
    if optim.min_lr and optim.lr_decay_style == "constant":
        yield (
            f"{key}.min_lr {optim.min_lr} has no effect with lr_decay_style constant: "
            "choose linear or cosine, or drop min_lr"
        )


def _reference(config: Config) -> Iterator[str]:
    if config.kl_kinds:
        if config.ref.parallel is not None:
            yield from _parallel("ref.parallel", config.ref.parallel)
        if config.ref.max_tokens_per_micro_batch is not None:
            yield from _micro_batch(config, "ref.max_tokens_per_micro_batch", config.ref.max_tokens_per_micro_batch)
        return
    settings = {
        "ref.parallel": config.ref.parallel,
        "ref.max_tokens_per_micro_batch": config.ref.max_tokens_per_micro_batch,
        "placement.ref": config.placement.ref,
    }
    for key, value in settings.items():
        if value is not None:
            yield (
                f"{key} is set, but algorithm.use_kl_in_reward and actor.use_kl_loss are false, so no reference is "
                f"built: drop {key}"
            )


def _rollout(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.top_k == 0:
        yield "rollout.top_k 0 keeps no token: set -1 (off) or at least 1"
    if rollout.max_total_tokens is not None:
        yield from context_errors(config, "rollout.max_total_tokens", rollout.max_total_tokens, "raise it")
    if any(not text for text in rollout.stop):
        yield "rollout.stop holds an empty string, which would end every response at once: remove it"


def _data(config: Config) -> Iterator[str]:
    if config.trainer.eval_interval and not config.data.val_files:
        yield (
            f"trainer.eval_interval {config.trainer.eval_interval} needs data.val_files, found none: "
            "name some or drop trainer.eval_interval"
        )
    names = [Path(file).stem for file in config.data.val_files]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"data.val_files: several are called {name!r}, under which each would be reported: rename or merge them"
    if config.data.prompt_key == config.data.label_key:
        yield f"data.prompt_key and data.label_key are both {config.data.prompt_key!r}: name two different fields"
