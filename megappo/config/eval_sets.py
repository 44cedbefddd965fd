"""What a run is evaluated on: data.val_files and eval.datasets as one table, with the defaults filled in; and how the
responses of training, and of each of these data sets, are played and scored."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megappo.config.eval_section import NONE, EvalDataset
from megappo.config.rollout_section import Rollout
from megappo.config.schema import Config, Data, Reward

TRAINING = ""
"""Among the names of `tasks`: no data set is called so."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """How responses to some prompts are played and scored.

    Attributes:
        rollout: with the prompts' own environment or tools. environment_key: of the config, that names these.
        reward: with their own function. reward_key: that names it.
    """

    rollout: Rollout
    environment_key: str
    reward: Reward
    reward_key: str


@dataclass(frozen=True, kw_only=True)
class EvalSet(Task):
    """A held-out data set.

    Attributes:
        section: of the config, where its own keys stand.
        key: that names its files.
        n, temperature, top_p, top_k, max_response_length: of its responses.
        data: how its files are read.
        pass_threshold: the score from which on a response passes.
    """

    section: str
    key: str
    files: tuple[str, ...]
    n: int
    temperature: float
    top_p: float
    top_k: int
    max_response_length: int
    data: Data
    pass_threshold: float


def eval_sets(config: Config) -> dict[str, EvalSet]:
    """By the name under which each is reported."""
    return dict(_named(config))


def tasks(config: Config) -> dict[str, Task]:
    """Of training, unless there is none, and of each of `eval_sets`."""
    of_training = {} if config.trainer.eval_only else {TRAINING: training_task(config)}
    return of_training | eval_sets(config)


def played_tasks(config: Config) -> dict[str, Task]:
    """Those that the run plays: none of data sets where it never evaluates."""
    return {name: one for name, one in tasks(config).items() if name == TRAINING or config.evaluates}


def training_task(config: Config) -> Task:
    """How training's responses are, and those of data sets that say nothing else."""
    return Task(
        rollout=config.rollout,
        environment_key=_environment_key("rollout", config.rollout),
        reward=config.reward,
        reward_key="reward.function",
    )


def _named(config: Config) -> Iterator[tuple[str, EvalSet]]:
    for name, file in zip(config.data.val_names, config.data.val_files, strict=True):
        yield name, _filled(config, EvalDataset(files=(file,)), "data", "data.val_files")
    for name, own in config.eval.datasets.items():
        yield name, _filled(config, own, f"eval.datasets.{name}", f"eval.datasets.{name}.files")


def _filled(config: Config, own: EvalDataset, section: str, key: str) -> EvalSet:
    rollout = config.rollout
    of_data = ("prompt_key", "label_key", "max_prompt_length")
    changes = {name: value for name in of_data if (value := getattr(own, name)) is not None}
    return EvalSet(
        **(vars(training_task(config)) | _own_task(config, own, section)),
        section=section,
        key=key,
        files=own.files,
        n=rollout.val_n if own.n is None else own.n,
        temperature=rollout.val_temperature if own.temperature is None else own.temperature,
        top_p=rollout.val_top_p if own.top_p is None else own.top_p,
        top_k=rollout.val_top_k if own.top_k is None else own.top_k,
        max_response_length=own.max_response_length or rollout.max_response_length,
        data=config.data.model_copy(update=changes),
        pass_threshold=rollout.val_pass_threshold if own.pass_threshold is None else own.pass_threshold,
    )


def _own_task(config: Config, own: EvalDataset, section: str) -> dict[str, Any]:
    """What of its `Task` a data set says itself."""
    found: dict[str, Any] = {}
    if own.environment is not None or own.tools:
        environment = None if own.environment == NONE else own.environment
        rollout = config.rollout.model_copy(update={"environment": environment, "tools": own.tools})
        found |= {"rollout": rollout, "environment_key": _environment_key(section, rollout)}
    if own.reward is not None:
        function = None if own.reward == NONE else own.reward
        reward = config.reward.model_copy(update={"function": function})
        found |= {"reward": reward, "reward_key": f"{section}.reward"}
    return found


def _environment_key(section: str, rollout: Rollout) -> str:
    return f"{section}.{'tools' if rollout.tools else 'environment'}"
