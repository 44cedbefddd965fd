"""The forms in which people write reward functions, told apart by their parameters, and how each is called.

Imported by the worker processes, so: the standard library alone.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

PROMPTS = "prompts"
"""A row's columns have the prompt as the file has it under this name, where the function takes that."""
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
MAX_SHOWN = 200
"""Characters of a signature that are shown."""


class BadFunction(Exception):
    """What is wrong with a function, or with what it gave; the message follows its name."""


@dataclass(frozen=True)
class Takes:
    """What a reward function takes of a record besides prompt and label.

    Attributes:
        needed: fields without which it cannot be called.
        welcome: fields that it gets where there are any; None: all.
        raw_prompts: the prompt as the file has it, too, a string or chat messages.
    """

    needed: tuple[str, ...] = ()
    welcome: tuple[str, ...] | None = ()
    raw_prompts: bool = False

    def names(self, field: str) -> bool:
        """Whether it gets a field of this name."""
        return self.welcome is None or field in self.needed or field in self.welcome

    def __or__(self, other: "Takes") -> "Takes":
        """What both take together."""
        needed = tuple(dict.fromkeys((*self.needed, *other.needed)))
        welcome = None
        if self.welcome is not None and other.welcome is not None:
            welcome = tuple(name for name in dict.fromkeys((*self.welcome, *other.welcome)) if name not in needed)
        return Takes(needed, welcome, self.raw_prompts or other.raw_prompts)


NOTHING = Takes()


class Graded(NamedTuple):
    """What reward functions found of a response.

    Attributes:
        scores: one or more, whose sum is its score.
        parts: further numbers, by name, to be told.
        answer: what is voted on where several responses to a prompt are compared; None where there is none.
    """

    scores: list[float]
    parts: dict[str, float]
    answer: str | None = None


@dataclass(frozen=True)
class Rows:
    """Responses to score: as many prompts (as the model sees them), responses, labels, and fields of their records."""

    prompts: list[str]
    responses: list[str]
    labels: list[Any]
    columns: list[dict[str, Any]]


Arguments = Mapping[str, list]
"""Parameter -> a value for each row."""


def _batched(function: Callable[..., Any], own: Arguments, columns: Sequence[Mapping[str, Any]]) -> Any:
    """One call for all rows. One without a field that others have gets None."""
    names = dict.fromkeys(name for row in columns for name in row)
    lists = {name: [row.get(name) for row in columns] for name in names}
    [result] = _awaited([function(**lists | own)])
    return result


def _row_by_row(function: Callable[..., Any], own: Arguments, columns: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A call for each row."""
    of_rows = [{**row, **{name: own[name][i] for name in own}} for i, row in enumerate(columns)]
    return _awaited([function(**of_row) for of_row in of_rows])


def _awaited(results: list) -> list:
    """What functions returned; of async ones, all run at the same time, what they return in the end."""
    if not any(map(inspect.isawaitable, results)):
        return results
    import asyncio  # not above: a worker would take twice as long to start

    async def together() -> list:
        return await asyncio.gather(*results)

    return asyncio.run(together())


@dataclass(frozen=True)
class Form:
    """A form of reward functions.

    Attributes:
        shown: as messages show it.
        mark: the parameter by which it is known.
        own: parameters that are no columns -> their values; a function may leave out any but the mark.
        call: of the function, the values of its own parameters, each row's columns.
        optional: the columns that it gets without needing them; None: any.
        raw_prompts: see `Takes`.
    """

    shown: str
    mark: str
    own: Mapping[str, Callable[[Rows], list]]
    call: Callable[[Callable[..., Any], Arguments, Sequence[Mapping[str, Any]]], Any]
    optional: tuple[str, ...] | None = None
    raw_prompts: bool = False


FORMS = (
    Form(
        "f(prompts, responses, labels, **columns)",
        "responses",
        {
            "prompts": attrgetter("prompts"),
            "responses": attrgetter("responses"),
            "labels": attrgetter("labels"),
        },
        _batched,
    ),
    Form(  # verl's
        "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)",
        "solution_str",
        {"solution_str": attrgetter("responses"), "ground_truth": attrgetter("labels")},
        _row_by_row,
        optional=("data_source", "extra_info"),
    ),
    Form(  # TRL's
        "f(prompts, completions, **columns)",
        "completions",
        {
            "prompts": lambda rows: [row[PROMPTS] for row in rows.columns],
            "completions": lambda rows: list(map(_completion, rows.columns, rows.responses)),
        },
        _batched,
        raw_prompts=True,
    ),
)


def _completion(columns: Mapping[str, Any], response: str) -> str | list[dict[str, str]]:
    """A text after a text, a message after messages."""
    return response if isinstance(columns[PROMPTS], str) else [{"role": "assistant", "content": response}]


@dataclass(frozen=True)
class RewardFunction:
    """A function and its form.

    Attributes:
        parameters: name -> whether it has no default.
        takes_any: it has **kwargs.
    """

    function: Callable[..., Any]
    form: Form
    parameters: Mapping[str, bool]
    takes_any: bool

    @property
    def takes(self) -> Takes:
        columns = {name: needed for name, needed in self.parameters.items() if name not in self.form.own}
        needed = tuple(name for name in columns if columns[name])
        welcome: tuple[str, ...] | None = tuple(name for name in columns if not columns[name])
        if self.form.optional is not None:
            welcome = tuple(name for name in self.form.optional if self._accepts(name) and name not in needed)
        elif self.takes_any:
            welcome = None
        return Takes(needed, welcome, self.form.raw_prompts)

    def __call__(self, rows: Rows) -> Any:
        """What it returns for all rows."""
        own = {name: values(rows) for name, values in self.form.own.items() if self._accepts(name)}
        takes = self.takes  # of what several functions take together
        columns = [{name: row[name] for name in row if takes.names(name)} for row in rows.columns]
        return self.form.call(self.function, own, columns)

    def _accepts(self, name: str) -> bool:
        return self.takes_any or name in self.parameters


def recognised(function: Callable[..., Any]) -> RewardFunction:
    """A function with its form. One that has no form's parameters may take prompts, responses and labels by position.

    Raises:
        BadFunction: it is of no form.
    """
    expected = "expected " + ", or ".join(form.shown for form in FORMS)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # of a function of C
        raise BadFunction(f"has no signature that can be read; {expected}") from error
    of_kinds = signature.parameters.values()
    names = {one.name: one.default is one.empty for one in of_kinds if one.kind in BY_NAME}
    for form in FORMS:
        if form.mark in names:
            return RewardFunction(function, form, names, any(one.kind is one.VAR_KEYWORD for one in of_kinds))
    try:
        signature.bind("prompts", "responses", "labels")
    except TypeError as error:
        raise BadFunction(f"takes {str(signature):.{MAX_SHOWN}}; {expected}") from error
    return recognised(lambda prompts, responses, labels: function(prompts, responses, labels))
