"""The kinds of values that keys have: bounded numbers, words, names in a table, paths."""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from megappo.config.coercion import EXPLAINED


def as_path(text: str) -> str:
    """A path in which ~ is expanded as by a shell.

    Raises:
        PydanticCustomError: it is empty, or holds what only a shell expands.
    """
    if not text.strip():
        raise PydanticCustomError(EXPLAINED, "it is empty: name a path, or write null where there is none")
    path = os.path.expanduser(text)
    if path.startswith("~") or re.search(r"\$[A-Za-z_{(]", path):
        remedy = "variables and unknown home folders are not expanded: write the whole path, or ./ before a name with ~"
        raise PydanticCustomError(EXPLAINED, remedy)
    return path


FilePath = Annotated[str, AfterValidator(as_path)]
"""A path, or a name that may begin with one, such as FILE.py:FUNCTION."""
Float = Annotated[float, Field(le=1e15)]
Fraction = Annotated[float, Field(ge=0, le=1)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e15)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e15)]
Seconds = Annotated[float, Field(gt=0, le=1e8)]
Positive = Annotated[int, Field(ge=1, le=10**6)]
"""A number of things handled one by one: prompts, responses, steps, GiB."""
Tokens = Annotated[int, Field(ge=1, le=10**9)]
Bytes = Annotated[int, Field(ge=1, le=2**40)]
Processes = Annotated[int, Field(ge=1, le=4096)]
NonNegative = Annotated[int, Field(ge=0, le=10**9)]
Seed = Annotated[int, Field(ge=0)]
TopK = Annotated[int, Field(ge=-1, le=10**9)]
LARGEST_PORT = 65535
MOST_RANKS = 100_000
"""Of a run, and so of every way of cutting a model."""
Ways = Annotated[int, Field(ge=1, le=MOST_RANKS)]
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AdaptedModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTED_MODULES: tuple[AdaptedModule, ...] = get_args(AdaptedModule)
TensorKind = Literal["weights", "gradients", "optimizer"]
KLKind = Literal["k1", "abs", "k2", "k3", "k1+", "k3+", "full", "kl", "mse", "low_var_kl"]
"""The last three are verl's words for k1, k2 and k3."""
_OfTokens = Literal["token_k1", "token_k2", "token_k3"]
_OfSums = Literal["seq_sum_k1", "seq_sum_k2", "seq_sum_k3"]
_OfOthers = Literal["seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"]
Rejection = Literal[_OfTokens, _OfSums, _OfOthers]
"""A divergence of engine and trainer, by token or over a response."""
TooLong = Literal["error", "skip", "truncate_left"]


class OneOf:
    """Of a text: it is one of the names of a table, which may grow until the config is read, or one of the others."""

    def __init__(self, table: Mapping[str, object], *others: str):
        self.table = table
        self.others = others

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.others, *self.table)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._known, handler(source))

    def _known(self, name: str) -> str:
        if name not in self.names:
            raise ValueError("not in the table")
        return name
