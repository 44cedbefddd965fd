"""The signatures of reward functions: this project's, verl's and TRL's, and the arguments that each is called with.

Worker processes import this, so it uses the standard library alone.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from megappo.userland.user_code import BadFunction

PROMPTS = "prompts"
"""The column with the prompt as the file has it, if the function takes that."""
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
MAX_SHOWN = 200
"""Characters of a signature that are shown."""
CallMode = Literal["row", "rows", "share"]
"""Ways to call a function: with one row; with one row while other calls are in progress (async); with many rows."""


@dataclass(frozen=True)
class InputSpec:
    """The fields of a record that people's code gets, besides prompt and label.

    Attributes:
        needed: fields without which it cannot be called.
        optional: fields that it gets if the record has them; None: all.
        raw_prompts: it gets the prompt as the file has it, too, a string or chat messages.
        by_environment: the needed fields that an environment needs.
        tools: JSON schemas of the functions that an environment offers, for the chat template.
    """

    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] | None = ()
    raw_prompts: bool = False
    by_environment: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()

    def __or__(self, other: "InputSpec") -> "InputSpec":
        """Return the fields that either gets."""
        needed = tuple(dict.fromkeys((*self.needed, *other.needed)))
        optional = None
        if self.optional is not None and other.optional is not None:
            names = dict.fromkeys((*self.optional, *other.optional))
            optional = tuple(name for name in names if name not in needed)
        by_environment = self.by_environment + other.by_environment
        raw_prompts = self.raw_prompts or other.raw_prompts
        return InputSpec(needed, optional, raw_prompts, by_environment, self.tools + other.tools)


NO_INPUT = InputSpec()


class Row(NamedTuple):
    """A response, and what reward functions may see of its record.

    Attributes:
        prompt: as the model sees it.
        columns: the fields that the functions take besides prompt and label, as JSON.
        name: of the record, for messages.
    """

    prompt: str
    response: str
    label: Any
    columns: Mapping[str, Any]
    name: str = ""


@dataclass(frozen=True)
class Form:
    """A form of reward functions.

    Attributes:
        shown: as messages show it.
        mark: the parameter by which it is recognised.
        own: parameters that are no columns -> their value for a row; a function may leave out any but the mark.
        if_named: parameters that **kwargs does not get.
        per_row: it is called with one row, not with lists.
        optional: the columns that it gets without needing them; None: any.
        raw_prompts: see `InputSpec`.
    """

    shown: str
    mark: str
    own: Mapping[str, Callable[[Row], Any]]
    if_named: tuple[str, ...] = ()
    per_row: bool = False
    optional: tuple[str, ...] | None = None
    raw_prompts: bool = False


def _completion(row: Row) -> str | list[dict[str, str]]:
    """Return a response in the prompt's format: text after text, a message after messages."""
    is_text = isinstance(row.columns[PROMPTS], str)
    return row.response if is_text else [{"role": "assistant", "content": row.response}]


FORMS = (
    Form(
        "f(prompts, responses, labels, **columns)",
        mark="responses",
        own={"prompts": attrgetter("prompt"), "responses": attrgetter("response"), "labels": attrgetter("label")},
    ),
    Form(  # verl's; prompt_str is ours
        "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)",
        mark="solution_str",
        own={
            "solution_str": attrgetter("response"),
            "ground_truth": attrgetter("label"),
            "prompt_str": attrgetter("prompt"),
        },
        if_named=("prompt_str",),
        per_row=True,
        optional=("data_source", "extra_info"),
    ),
    Form(  # TRL's
        "f(prompts, completions, **columns)",
        mark="completions",
        own={"prompts": lambda row: row.columns[PROMPTS], "completions": _completion},
        raw_prompts=True,
    ),
)


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
    def inputs(self) -> InputSpec:
        columns = {name: needed for name, needed in self.parameters.items() if name not in self.form.own}
        needed = tuple(name for name in columns if columns[name])
        optional: tuple[str, ...] | None = tuple(name for name in columns if not columns[name])
        if self.form.optional is not None:
            optional = tuple(name for name in self.form.optional if self._accepts(name) and name not in needed)
        elif self.takes_any:
            optional = None
        return InputSpec(needed, optional, self.form.raw_prompts)

    @property
    def is_async(self) -> bool:
        return any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))

    @property
    def mode(self) -> CallMode:
        if not self.form.per_row:
            return "share"
        return "rows" if self.is_async else "row"

    def arguments(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the keyword arguments of a call with rows: one, if the form is called per row. In a list of a column
        None stands for rows without it."""
        inputs = self.inputs  # the rows have the columns of other functions, too
        known = {*inputs.needed, *(inputs.optional or ())}
        names = dict.fromkeys(name for row in rows for name in row.columns)
        columns = [name for name in names if name not in self.options and (inputs.optional is None or name in known)]
        lists = {name: [row.columns.get(name) for row in rows] for name in columns}
        for name, value_of in self.form.own.items():
            if self._accepts(name):
                lists[name] = [value_of(row) for row in rows]
        if self.form.per_row:
            return {name: values[0] for name, values in lists.items()} | dict(self.options)
        return lists | dict(self.options)

    def _accepts(self, name: str) -> bool:
        return name in self.parameters or (self.takes_any and name not in self.form.if_named)


def recognise(function: Callable[..., Any], options: Mapping[str, Any]) -> RewardFunction:
    """Return a function with its form. One without the parameters of a form may take prompts, responses and labels by
    position.

    Args:
        options: arguments that it gets in every call.
    Raises:
        BadFunction: it has no form, or does not take the options.
    """
    expected = "expected " + ", or ".join(form.shown for form in FORMS)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # a function written in C
        raise BadFunction(f"has no signature that can be read; {expected}") from error
    parameters = signature.parameters.values()
    names = {one.name: one.default is one.empty for one in parameters if one.kind in BY_NAME}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    for form in FORMS:
        if form.mark in names:
            for name in options:
                if name in form.own or not (takes_any or name in names):
                    own = ", ".join(name for name in names if name not in form.own) or "none"
                    raise BadFunction(f"takes no option {name!r} of reward.options; it has these parameters: {own}")
            needed = {name: is_needed for name, is_needed in names.items() if name not in options}
            return RewardFunction(function, form, needed, takes_any, options)
    try:
        signature.bind("prompts", "responses", "labels")
    except TypeError as error:
        raise BadFunction(f"takes {str(signature):.{MAX_SHOWN}}; {expected}") from error
    return recognise(lambda prompts, responses, labels: function(prompts, responses, labels), options)
