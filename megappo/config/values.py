"""Types of config values (bounded numbers, words, names in a table, paths), and how a section declares its keys."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, get_args

from annotated_types import MinLen
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StrictBool,
    StrictFloat,
    StrictInt,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from megappo.config.config_error import Errors
from megappo.config.hub import cached_model
from megappo.config.methods import Method

TABLE_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Name that a user gives in eval.datasets or teachers: a part of keys and of metrics."""
MOST_CRITICS = 8
"""The largest critic.ensemble: each critic has fields of rows of its own."""
CRITICS = ("critic", *(f"critic_{number}" for number in range(2, MOST_CRITICS + 1)))
"""Names of the critics of the largest ensemble."""
EXPLAINED = "explained"
"""Type of a validation error whose text is printed after the expected values."""


def as_path(text: str) -> str:
    """Return a path in which ~ is expanded as a shell does.

    Raises:
        PydanticCustomError: it is empty, or holds something that only a shell expands.
    """
    path = os.path.expanduser(text)
    if not path.strip() or path.startswith("~") or re.search(r"\$[A-Za-z_{(]", path):
        reason = "empty paths, variables and unknown home folders are not read: write the whole path"
        raise PydanticCustomError(EXPLAINED, reason)
    return path


def table_name(name: str) -> str:
    """Return a name that a user gives in a table.

    Raises:
        PydanticCustomError: it cannot be a part of keys and of metrics.
    """
    if not TABLE_NAME.fullmatch(name):
        raise PydanticCustomError(EXPLAINED, "a name of letters, digits, _ and - alone")
    return name


def as_number(value: object) -> object:
    """Read text such as 1e-6, which YAML does not take for a number; refuse true and false, which pydantic reads, and
    integers of more than 64 bits."""
    if isinstance(value, bool):
        raise ValueError("not a number")
    if isinstance(value, str):
        value = int(value) if value.isdigit() else float(value)
    if isinstance(value, int) and value >= 2**63:
        raise PydanticCustomError(EXPLAINED, "at most 2**63 - 1")
    return value


def as_list(value: object) -> object:
    """Treat a single string or number as a list of one."""
    return (value,) if isinstance(value, str | int | float) else value


NUMBER = BeforeValidator(as_number)
LISTED = BeforeValidator(as_list)

Float = Annotated[float, NUMBER]
PositiveFloat = Annotated[float, Field(gt=0), NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0), NUMBER]
AboveOne = Annotated[float, Field(gt=1), NUMBER]
AtLeastOne = Annotated[float, Field(ge=1), NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1), NUMBER]
PositiveFraction = Annotated[float, Field(gt=0, le=1), NUMBER]
BetweenZeroAndOne = Annotated[float, Field(gt=0, lt=1), NUMBER]
Decay = Annotated[float, Field(ge=0, lt=1), NUMBER]
Seconds = Annotated[float, Field(ge=0.1, le=10**9), NUMBER]
"""A timeout: a shorter one ends what it limits at once, and the clocks of libraries overflow at longer ones."""
Positive = Annotated[int, Field(ge=1), NUMBER]
NonNegative = Annotated[int, Field(ge=0), NUMBER]
TopK = Literal[-1] | Positive
Processes = Annotated[int, Field(ge=1, le=4096), NUMBER]
LARGEST_PORT = 65535
Port = Annotated[int, Field(ge=0, le=LARGEST_PORT), NUMBER]
Ranks = Annotated[str, Field(coerce_numbers_to_str=True)]  # YAML reads a rank as a number

FilePath = Annotated[str, AfterValidator(as_path)]
"""A path, or a name that may begin with one, such as FILE.py:FUNCTION."""
TableName = Annotated[str, AfterValidator(table_name)]
ModelPath = Annotated[str, AfterValidator(as_path), AfterValidator(cached_model)]
"""A folder, or the id of a model on the Hugging Face hub; resolved where the model is in the local cache."""
FilePaths = Annotated[tuple[FilePath, ...], LISTED]
SomeFilePaths = Annotated[tuple[FilePath, ...], MinLen(1), LISTED]
Texts = Annotated[tuple[str, ...], LISTED]
FieldValues = Annotated[tuple[StrictBool | StrictInt | StrictFloat | str, ...], MinLen(1), LISTED]
"""Values of a field of a data record."""

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AdaptedModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTED_MODULES: tuple[AdaptedModule, ...] = get_args(AdaptedModule)
ParameterGroup = Literal["embedding", "attention", "mlp"]
TensorKind = Literal["weights", "gradients", "optimizer"]
KLKind = Literal["k1", "abs", "k2", "k3", "k1+", "k3+", "full", "kl", "mse", "low_var_kl"]
"""The last three are verl's names for k1, k2 and k3."""
_OfTokens = Literal["token_k1", "token_k2", "token_k3"]
_OfSums = Literal["seq_sum_k1", "seq_sum_k2", "seq_sum_k3"]
_OfOthers = Literal["seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"]
Rejection = Literal[_OfTokens, _OfSums, _OfOthers]
"""A divergence between engine and trainer, of each token or over a response."""
HealthRule = Literal[
    "no_reward_signal",
    "equal_groups",
    "truncation",
    "repetition",
    "entropy_collapse",
    "entropy_explosion",
    "reference_kl",
    "update_kl",
    "clip_fraction",
    "left_out_tokens",
    "ratio",
    "explained_variance",
    "gradient_norm",
    "value_loss",
    "value_support",
    "accuracy",
    "value_range",
    "return_drift",
    "log_prob_diff",
    "reward_failures",
    "lost_episodes",
    "new_segments",
    "staleness",
    "expert_load",
]
"""Names of `lab.report.health.RULES`."""
TooLong = Literal["error", "skip", "truncate_left"]


class OneOf:
    """Constraint of a text: a name in a table, which may grow until the config is read."""

    def __init__(self, table: Mapping[str, object]):
        self.table = table

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.table)}

    def _known(self, name: str) -> str:
        if name not in self.table:
            raise ValueError("not in the table")
        return name


class Section(BaseModel):
    """Base of all sections: frozen, with an error for an unknown key.

    Attributes:
        method_key: key that chooses one of `methods`. A key in the `reads` of some of them is read by these alone.
    """

    method_key: ClassVar[str] = ""
    methods: ClassVar[Mapping[str, Method]] = {}

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    def contradictions(self) -> Errors:
        """Yield an error for keys of this section that contradict each other: the keys, their values, the remedy."""
        yield from ()


@dataclass(frozen=True)
class ReadIf:
    """Condition under which a run reads a key, or the keys of a section.

    Attributes:
        switch: dotted key that decides.
        holds: (config) -> bool; None = the switch's own value.
        reason: why the key is not read. {} stand for the switch and its value.
        others: further keys that decide.
        always: keys of a section that are read in any case.
    """

    switch: str
    holds: Callable[[Any], object] | None = None
    reason: str = "{} is {}"
    others: tuple[str, ...] = ()
    always: tuple[str, ...] = ()

    def is_read(self, config: Any) -> bool:
        """Return whether a run of the config reads the key."""
        holds = self.holds or attrgetter(self.switch)
        return bool(holds(config))


def key(default: Any, meaning: str, *, read_if: ReadIf | tuple[ReadIf, ...] = ()) -> Any:
    """Declare a key. `...` as its default means that it must be set."""
    field = Field(default, description=meaning)
    field.metadata += read_if if isinstance(read_if, tuple) else (read_if,)
    return field
