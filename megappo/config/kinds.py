"""The kinds of values that keys have: bounded numbers, words, names in a table."""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
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


NOT_A_PATH = "not_a_path"
"""The type of the error about a path that only a shell could read."""


def expanded(path: str) -> str:
    """A path, or what begins with one, with the home folder in place of ~ at its start.

    Raises:
        PydanticCustomError: it has a variable, or names nobody's home folder.
    """
    found = os.path.expanduser(path)
    if found.startswith("~") or re.search(r"\$[A-Za-z_{]", path):
        remedy = "variables and this home folder are not known here: write the whole path, or ./ before a name with ~"
        raise PydanticCustomError(NOT_A_PATH, remedy)
    return found


PathText = Annotated[str, AfterValidator(expanded)]


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
