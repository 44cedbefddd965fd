"""Sections of the config, their keys, and the rules declared beside the keys."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from megappo.config.methods import Method

Checked = TypeVar("Checked", bound=BaseModel)


@dataclass(frozen=True)
class ReadIf:
    """Condition under which a run reads a key, or the keys of a section.

    Attributes:
        switches: dotted keys that decide. An error names the first.
        holds: (config) -> bool.
        reason: why the key is not read. {} stand for the first switch and its value.
        always: keys of a section that are read in any case.
    """

    switches: tuple[str, ...]
    holds: Callable[[Any], object]
    reason: str = "{} is {}"
    always: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeyRule(Generic[Checked]):
    """Values that contradict each other.

    Attributes:
        is_broken: (section) -> bool.
        error: names the keys, their values and the remedy. {key} stands for the value of a key of the section.
    """

    is_broken: Callable[[Checked], object]
    error: str

    def errors(self, section: Checked) -> list[str]:
        """Return the error, if the section breaks the rule."""
        return [self.error.format(**dict(section))] if self.is_broken(section) else []


class Section(BaseModel):
    """Base of all sections: frozen, with an error for an unknown key.

    Attributes:
        rules: which values of its keys contradict each other.
        method_key: key that chooses one of `methods`. A key in the `reads` of some of them is read by these alone.
    """

    rules: ClassVar[tuple[KeyRule[Any], ...]] = ()
    method_key: ClassVar[str] = ""
    methods: ClassVar[Mapping[str, Method]] = {}

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


@dataclass(frozen=True)
class Usual:
    """Range of a number outside of which the dry run warns, and the reason."""

    low: float
    high: float
    reason: str


def key(default: Any, meaning: str, *, read_if: ReadIf | tuple[ReadIf, ...] = (), usual: Usual | None = None) -> Any:
    """Declare a key. `...` as its default means that it must be set."""
    field = Field(default, description=meaning)
    field.metadata += read_if if isinstance(read_if, tuple) else (read_if,)
    field.metadata += [usual] if usual else []
    return field


HAS_VALUES = ReadIf(
    ("algorithm.adv_estimator",),
    lambda run: run.has_values,
    "{} {} does without values, which gae needs",
)
HAS_CRITIC = ReadIf(
    ("algorithm.adv_estimator", "algorithm.shared_backbone"),
    lambda run: run.has_critic,
    "this run builds no critic",
    always=("value_clip", "huber_delta", "loss_agg_mode"),
)
HAS_REFERENCE = ReadIf(
    ("algorithm.use_kl_in_reward", "actor.use_kl_loss"),
    lambda run: run.kl_kinds,
    "{} and actor.use_kl_loss are false, so that no reference is built",
)
HAS_HELD_OUT = ReadIf(
    ("data.val_files", "eval.datasets"),
    lambda run: run.held_out_names,
    "{} and eval.datasets are empty",
)
