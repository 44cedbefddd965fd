"""Keys of evaluations that contradict each other."""

import re
from collections.abc import Iterator

from megappo.config.errors import shorten
from megappo.config.eval_section import NONE
from megappo.config.eval_sets import EvalSet, eval_sets
from megappo.config.schema import Config

NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Of a data set of eval.datasets: a part of keys and of metrics."""


def evaluation_errors(config: Config) -> Iterator[str]:
    """Every contradiction, one line each, naming the keys, their values and the remedy."""
    if config.trainer.eval_interval and not config.held_out_names:
        yield (
            f"trainer.eval_interval {config.trainer.eval_interval} needs data.val_files, found none: "
            "name some, or set trainer.eval_interval to null"
        )
    yield from _eval_only(config)
    yield from _names(config)
    if config.rollout.val_top_k == 0:
        yield "rollout.val_top_k 0 keeps no token: set -1 (off) or at least 1"
    for name, one in eval_sets(config).items():
        yield from _sampling(config, name, one)
        yield from _own(config, name, one)


def _eval_only(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if not trainer.eval_only:
        return
    if not config.held_out_names:
        yield "trainer.eval_only needs data.val_files or eval.datasets, found none: name some"
    for key in ("rollout_only", "record_rollouts", "replay_rollouts"):
        if getattr(trainer, key):
            yield f"trainer.{key} is of runs that have steps, and trainer.eval_only has none: drop one of them"


def _names(config: Config) -> Iterator[str]:
    names = config.data.val_names
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"data.val_files: several are called {name!r}, under which each would be reported: rename or merge them"
    for name in config.eval.datasets:
        if not NAME.fullmatch(name):
            yield f"eval.datasets: {shorten(repr(name))} is no name: write it with letters, digits, _ and - alone"
        if name in names:
            yield f"eval.datasets.{name}: one of data.val_files is called {name!r}, too: rename it, or drop one of them"


def _sampling(config: Config, name: str, one: EvalSet) -> Iterator[str]:
    """Of several responses to a prompt, if they are all the same."""
    given = config.eval.datasets.get(name)
    n_key, temperature_key = (
        f"{one.section}.{key}" if given is not None and getattr(given, key) is not None else f"rollout.val_{key}"
        for key in ("n", "temperature")
    )
    if one.n > 1 and (one.temperature == 0 or one.top_k == 1):
        yield (
            f"{n_key} {one.n} asks for as many times the same response to each prompt of {name}, as {temperature_key} "
            f"is {one.temperature:g} and top_k {one.top_k}: raise {temperature_key}, or set {n_key} to 1"
        )


def _own(config: Config, name: str, one: EvalSet) -> Iterator[str]:
    """What only a data set of eval.datasets may say."""
    given = config.eval.datasets.get(name)
    if given is None:
        return
    if given.top_k == 0:
        yield f"{one.section}.top_k 0 keeps no token: set -1 (off) or at least 1"
    if given.environment is not None and given.tools:
        yield f"{one.section}.environment and {one.section}.tools are both set: drop one"
    if given.reward not in (None, NONE) and not one.reward.weights:
        yield f"{one.section}.reward {given.reward} has no function of a weight but 0: name one"
    if one.data.prompt_key == one.data.label_key != config.data.prompt_key:
        found = repr(one.data.prompt_key)
        yield f"{one.section}.prompt_key and {one.section}.label_key are both {found}: name two different fields"
