"""The forms in which people write reward functions, told apart by their parameters, and how each is called.

Imported by the worker processes, so: the standard library alone.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import asyncio

PROMPTS = "prompts"
"""A row's columns have the prompt as the file has it under this name, where the function takes that."""
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
MAX_SHOWN = 200
"""Characters of a signature that are shown."""


class BadFunction(Exception):
    """What is wrong with a function, or with what it gave; the message follows its name."""


@dataclass(frozen=True)
class Takes:
    """What a reward function, or an environment, takes of a record besides prompt and label.

    Attributes:
        needed: fields without which it cannot be called.
        by_environment: those of them that an environment needs.
        welcome: fields that it gets where there are any; None: all.
        raw_prompts: the prompt as the file has it, too, a string or chat messages.
        tools: JSON schemas of functions that an environment offers, of which the chat template is to tell.
    """

    needed: tuple[str, ...] = ()
    welcome: tuple[str, ...] | None = ()
    raw_prompts: bool = False
    by_environment: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    def names(self, field: str) -> bool:
        """Whether it gets a field of this name."""
        return self.welcome is None or field in self.needed or field in self.welcome

    def __or__(self, other: "Takes") -> "Takes":
        """What both take together."""
        needed = tuple(dict.fromkeys((*self.needed, *other.needed)))
        welcome = None
        if self.welcome is not None and other.welcome is not None:
            welcome = tuple(name for name in dict.fromkeys((*self.welcome, *other.welcome)) if name not in needed)
        by_environment = self.by_environment + other.by_environment
        raw_prompts, tools = self.raw_prompts or other.raw_prompts, self.tools + other.tools
        return Takes(needed, welcome, raw_prompts, by_environment, tools)


NOTHING = Takes()


Step = tuple[int, float]
"""How many characters of a response there are where one of its steps ends, and the step's score."""


class Graded(NamedTuple):
    """What reward functions found of a response.

    Attributes:
        scores: one or more, whose sum is its score; none of functions where one failed.
        parts: further numbers, by name, to be told.
        answer: what is voted on where several responses to a prompt are compared; None where there is none.
        failed: a function has.
        loss_weight: what its losses are multiplied by; None where none is told.
        steps: beside each of the scores, or the first of them, those of steps, by ascending ends.
    """

    scores: list[float]
    parts: dict[str, float]
    answer: str | None = None
    failed: bool = False
    loss_weight: float | None = None
    steps: Sequence[Sequence[Step]] = ()

    @property
    def totals(self) -> list[float]:
        """The scores with those of their steps: what is trained on."""
        if not self.steps:
            return self.scores
        both = zip_longest(self.scores, self.steps, fillvalue=())
        return [math.fsum([outcome, *(score for _, score in steps)]) for outcome, steps in both]


@dataclass(frozen=True)
class Rows:
    """Responses to score: as many prompts (as the model sees them), responses, labels, and fields of their records."""

    prompts: list[str]
    responses: list[str]
    labels: list[Any]
    columns: list[dict[str, Any]]


Call = dict[str, Any]
"""The keyword arguments of one."""
Way = Literal["row", "rows", "share"]
"""How a function is called: with a row; with a row, and with others meanwhile, as it is async; with many rows."""


@dataclass(frozen=True)
class Form:
    """A form of reward functions.

    Attributes:
        shown: as messages show it.
        mark: the parameter by which it is known.
        own: parameters that are no columns -> their values; a function may leave out any but the mark.
        if_named: of these, such as **kwargs does not get.
        per_row: it is called with one row, not with lists.
        optional: the columns that it gets without needing them; None: any.
        raw_prompts: see `Takes`.
    """

    shown: str
    mark: str
    own: Mapping[str, Callable[[Rows], list]]
    if_named: tuple[str, ...] = ()
    per_row: bool = False
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
    ),
    Form(  # verl's
        "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)",
        "solution_str",
        {
            "solution_str": attrgetter("responses"),
            "ground_truth": attrgetter("labels"),
            "prompt_str": attrgetter("prompts"),
        },
        if_named=("prompt_str",),  # ours
        per_row=True,
        optional=("data_source", "extra_info"),
    ),
    Form(  # TRL's
        "f(prompts, completions, **columns)",
        "completions",
        {
            "prompts": lambda rows: [row[PROMPTS] for row in rows.columns],
            "completions": lambda rows: list(map(_completion, rows.columns, rows.responses)),
        },
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
        parameters: name -> whether it has no default; without the options.
        takes_any: it has **kwargs.
        options: arguments that it gets in every call.
    """

    function: Callable[..., Any]
    form: Form
    parameters: Mapping[str, bool]
    takes_any: bool
    options: Mapping[str, Any]

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

    @property
    def way(self) -> Way:
        if not self.form.per_row:
            return "share"
        is_async = map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__))
        return "rows" if any(is_async) else "row"

    def calls(self, rows: Rows) -> list[Call]:
        """What it is called with: for each row, or once for all. One without a field that others have has None then."""
        given = [name for name in self.form.own if self._accepts(name)]
        own = {name: self.form.own[name](rows) for name in given}
        takes = self.takes  # of what several functions take together
        columns = [{name: row[name] for name in row if self._is_column(name, takes)} for row in rows.columns]
        if self.form.per_row:
            return [{**row, **{name: own[name][i] for name in own}, **self.options} for i, row in enumerate(columns)]
        names = dict.fromkeys(name for row in columns for name in row)
        return [{name: [row.get(name) for row in columns] for name in names} | own | dict(self.options)]

    def _accepts(self, name: str) -> bool:
        return name in self.parameters or (self.takes_any and name not in self.form.if_named)

    def _is_column(self, name: str, takes: Takes) -> bool:
        return takes.names(name) and name not in self.options


def awaited(result: Any) -> Any:
    """What a function returned; of an async one, what it returns in the end."""
    return runner().run(_finished(result)) if inspect.isawaitable(result) else result


@cache
def runner() -> "asyncio.Runner":
    """Of this process's async functions: one, as what they keep between calls belongs to its loop."""
    import asyncio  # not above: a worker would take twice as long to start

    return asyncio.Runner()


async def _finished(result: Any) -> Any:
    return await result


def recognised(function: Callable[..., Any], options: Mapping[str, Any] | None = None) -> RewardFunction:
    """A function with its form. One that has no form's parameters may take prompts, responses and labels by position.

    Args:
        options: arguments that it gets in every call.
    Raises:
        BadFunction: it is of no form, or has no such options.
    """
    options = options or {}
    expected = "expected " + ", or ".join(form.shown for form in FORMS)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # of a function of C
        raise BadFunction(f"has no signature that can be read; {expected}") from error
    of_kinds = signature.parameters.values()
    names = {one.name: one.default is one.empty for one in of_kinds if one.kind in BY_NAME}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in of_kinds)
    for form in FORMS:
        if form.mark in names:
            unknown = [name for name in options if name in form.own or not (takes_any or name in names)]
            if unknown:
                own = ", ".join(name for name in names if name not in form.own) or "none"
                raise BadFunction(f"takes no option {unknown[0]!r} of reward.options; it has these parameters: {own}")
            parameters = {name: needed for name, needed in names.items() if name not in options}
            return RewardFunction(function, form, parameters, takes_any, options)
    try:
        signature.bind("prompts", "responses", "labels")
    except TypeError as error:
        raise BadFunction(f"takes {str(signature):.{MAX_SHOWN}}; {expected}") from error
    return recognised(lambda prompts, responses, labels: function(prompts, responses, labels), options)
