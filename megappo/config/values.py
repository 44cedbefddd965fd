"""Types of config values: bounded numbers, words, names in a table, paths."""

import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

from annotated_types import MinLen
from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

EXPLAINED = "explained"
"""Type of a validation error whose text is printed after the expected values."""


def must(holds: Callable[[Any], object], remedy: str) -> AfterValidator:
    """Return a validator that accepts the values for which `holds` is true."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise PydanticCustomError(EXPLAINED, remedy)
        return value

    return AfterValidator(check)


def as_path(text: str) -> str:
    """Return a path in which ~ is expanded as a shell does.

    Raises:
        PydanticCustomError: it is empty, or holds something that only a shell expands.
    """
    if not text.strip():
        raise PydanticCustomError(EXPLAINED, "it is empty: name a path, or write null where there is none")
    path = os.path.expanduser(text)
    if path.startswith("~") or re.search(r"\$[A-Za-z_{(]", path):
        remedy = "variables and unknown home folders are not expanded: write the whole path, or ./ before a name with ~"
        raise PydanticCustomError(EXPLAINED, remedy)
    return path


def as_number(value: object) -> int | float:
    """Read a number, also one that YAML takes for text, such as 1e-6; not true, 1_000 or digits of other scripts."""
    if isinstance(value, str) and value.isascii() and "_" not in value:
        value = int(value) if value.strip().lstrip("+-").isdigit() else float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number")
    return value


def as_whole_number(value: object) -> int:
    """Read an integer, which may be written as 1e3 or 8.0."""
    number = as_number(value)
    if isinstance(number, float) and not number.is_integer():
        raise ValueError("not a whole number")
    return int(number)


def as_list(value: object) -> object:
    """Take a single string for a list of one."""
    return (value,) if isinstance(value, str) else value


NUMBER, WHOLE, LISTED = BeforeValidator(as_number), BeforeValidator(as_whole_number), BeforeValidator(as_list)

Float = Annotated[float, Field(le=1e15), NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1), NUMBER]
PositiveFraction = Annotated[float, Field(gt=0, le=1), NUMBER]
OpenFraction = Annotated[float, Field(gt=0, lt=1), NUMBER]
Decay = Annotated[float, Field(ge=0, lt=1), NUMBER]
PositiveFloat = Annotated[float, Field(gt=0, le=1e15), NUMBER]
BELOW_ONE = must(lambda rate: rate < 1, "Adam would change every weight by it in a step: lower it")
LearningRate = Annotated[float, Field(gt=0, le=1e15), BELOW_ONE, NUMBER]
AboveOne = Annotated[float, Field(gt=1, le=1e15), NUMBER]
AtLeastOne = Annotated[float, Field(ge=1, le=1e15), NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e15), NUMBER]
Seconds = Annotated[float, Field(gt=0, le=1e8), NUMBER]
GiB = Annotated[float, Field(gt=0, le=10**6), NUMBER]
Positive = Annotated[int, Field(ge=1, le=10**6), WHOLE]
"""Number of things that are handled one by one: prompts, responses, steps."""
TokenCount = Annotated[int, Field(ge=1, le=10**9), WHOLE]
Bytes = Annotated[int, Field(ge=1, le=2**40), WHOLE]
Processes = Annotated[int, Field(ge=1, le=4096), WHOLE]
NonNegative = Annotated[int, Field(ge=0, le=10**9), WHOLE]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1), WHOLE]
KEEPS_TOKENS = must(lambda k: k != 0, "it keeps no token: set -1 (off) or at least 1")
TopK = Annotated[int, Field(ge=-1, le=10**9), KEEPS_TOKENS, WHOLE]
LARGEST_PORT = 65535
Port = Annotated[int, Field(ge=0, le=LARGEST_PORT), WHOLE]
MOST_RANKS = 100_000
"""Ranks of a run, and so the largest size of every kind of parallelism."""
Ways = Annotated[int, Field(ge=1, le=MOST_RANKS), WHOLE]

FilePath = Annotated[str, AfterValidator(as_path)]
"""A path, or a name that may begin with one, such as FILE.py:FUNCTION."""
FilePaths = Annotated[tuple[FilePath, ...], LISTED]
SomeFilePaths = Annotated[tuple[FilePath, ...], MinLen(1), LISTED]
Texts = Annotated[tuple[str, ...], LISTED]
FieldName = Annotated[str, must(lambda name: name.strip("-"), "it names no field: name one, or set it to null")]

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AdaptedModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTED_MODULES: tuple[AdaptedModule, ...] = get_args(AdaptedModule)
TensorKind = Literal["weights", "gradients", "optimizer"]
KLKind = Literal["k1", "abs", "k2", "k3", "k1+", "k3+", "full", "kl", "mse", "low_var_kl"]
"""The last three are verl's names for k1, k2 and k3."""
_OfTokens = Literal["token_k1", "token_k2", "token_k3"]
_OfSums = Literal["seq_sum_k1", "seq_sum_k2", "seq_sum_k3"]
_OfOthers = Literal["seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"]
Rejection = Literal[_OfTokens, _OfSums, _OfOthers]
"""A divergence between engine and trainer, of each token or over a response."""
TooLong = Literal["error", "skip", "truncate_left"]


class OneOf:
    """Constraint of a text: a name in a table, which may grow until the config is read, or one of some other words."""

    def __init__(self, table: Mapping[str, object], *others: str):
        self.table = table
        self.others = others

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.others, *self.table)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.names)}

    def _known(self, name: str) -> str:
        if name not in self.names:
            raise ValueError("not in the table")
        return name
