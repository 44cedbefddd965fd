"""What a run is evaluated on: data.val_files and eval.datasets as one table, with the defaults filled in."""

from collections.abc import Iterator
from dataclasses import dataclass

from megappo.config.eval_section import EvalDataset
from megappo.config.schema import Config, Data, Reward


@dataclass(frozen=True)
class EvalSet:
    """A held-out data set.

    Attributes:
        section: of the config, where its own keys stand.
        key: that names its files.
        n, temperature, top_p, top_k, max_response_length: of its responses.
        data: how its files are read.
        reward: with its own function.
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
    reward: Reward
    pass_threshold: float


def eval_sets(config: Config) -> dict[str, EvalSet]:
    """By the name under which each is reported."""
    return dict(_named(config))


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
        section,
        key,
        own.files,
        n=rollout.val_n if own.n is None else own.n,
        temperature=rollout.val_temperature if own.temperature is None else own.temperature,
        top_p=rollout.val_top_p if own.top_p is None else own.top_p,
        top_k=rollout.val_top_k if own.top_k is None else own.top_k,
        max_response_length=own.max_response_length or rollout.max_response_length,
        data=config.data.model_copy(update=changes),
        reward=config.reward if own.reward is None else config.reward.model_copy(update={"function": own.reward}),
        pass_threshold=own.pass_threshold,
    )
