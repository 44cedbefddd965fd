"""The signatures of reward functions, this project's, verl's, TRL's and OpenRLHF's, called in a worker process.

Worker processes import this, so it uses the standard library alone.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial, reduce
from operator import or_
from typing import Any, Literal, NamedTuple

from megappo.user_modules import Home
from megappo.userland.user_code import BadFunction, JsonObject, home, load

PROMPTS = "prompts"
"""The column with the prompt as the file has it, if the function takes that."""
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
NO_SCORE: JsonObject = {"score": 0.0, "loss_weight": 0.0, "unscored": 1.0}
"""The grade of a row that a function does not score."""
MAX_SHOWN = 200
"""Characters of a signature that are shown."""
CallMode = Literal["one", "one_async", "list"]
"""Ways to call a function: with one row; with one row while other calls are in progress; with a list of rows."""


@dataclass(frozen=True)
class InputSpec:
    """The fields of a record that user code gets, besides prompt and label.

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
    tools: tuple[JsonObject, ...] = ()

    def __or__(self, other: "InputSpec") -> "InputSpec":
        """Return the fields that either gets."""
        needed = tuple(dict.fromkeys((*self.needed, *other.needed)))
        optional = None
        if self.optional is not None and other.optional is not None:
            names = dict.fromkeys((*self.optional, *other.optional))
            optional = tuple(name for name in names if name not in needed)
        return InputSpec(
            needed,
            optional,
            self.raw_prompts or other.raw_prompts,
            self.by_environment + other.by_environment,
            self.tools + other.tools,
        )


NO_INPUT = InputSpec()


class Row(NamedTuple):
    """A response, and what reward functions may see of its record.

    Attributes:
        prompt: the prompt as the model sees it.
        columns: the fields that the functions take besides prompt and label, as JSON.
        name: name of the record, for messages; the worker does not get it.
    """

    prompt: str
    response: str
    label: Any
    columns: JsonObject
    name: str = ""

    @property
    def raw_prompt(self) -> Any:
        """The prompt as the file has it."""
        return self.columns[PROMPTS]

    @property
    def query(self) -> str:
        """The prompt as the model sees it, with the response."""
        return self.prompt + self.response

    @property
    def completion(self) -> str | list[dict[str, str]]:
        """The response in the raw prompt's format: text after text, a message after messages."""
        is_text = isinstance(self.raw_prompt, str)
        return self.response if is_text else [{"role": "assistant", "content": self.response}]


def none_as_no_score(values: Any) -> Any:
    """Return the values of TRL's form, which returns None for a row that it does not score."""
    return [NO_SCORE if one is None else one for one in values] if isinstance(values, list) else values


def from_openrlhf(returned: Any) -> list[Any]:
    """Return the value of the only row of OpenRLHF's form, which returns lists or tensors of one number."""
    if not isinstance(returned, Mapping):
        return [_only(returned)]
    logs = {name: _only(values) for name, values in (returned.get("extra_logs") or {}).items()}
    return [{**logs, "score": _only(returned["rewards"])}]


def _only(values: Any) -> Any:
    """Return the number in a list or tensor of one; anything else as it is."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    return plain[0] if isinstance(plain, list) and len(plain) == 1 else plain


@dataclass(frozen=True)
class Form:
    """A form of reward functions: what makes arguments of rows, and values of what a function returns.

    Attributes:
        shown: the form as messages show it; **kwargs gets only the parameters that it has.
        own: parameters that are no columns -> the attribute of a row. A function may leave out any but the first one,
            by which its form is recognised.
        optional: the columns that it gets without needing them; None: any.
        by_position: a function's first parameters are its own, whatever their names.
        per_row: it is called with one row.
        with_values: it gets the values of this row, not lists of one.
        raw_prompts: see `InputSpec`.
        read: returns one value for each row from what a function returned.
    """

    shown: str
    own: Mapping[str, str]
    optional: tuple[str, ...] | None = None
    by_position: bool = False
    per_row: bool = False
    with_values: bool = False
    raw_prompts: bool = False
    read: Callable[[Any], Any] = lambda returned: returned


FORMS = (
    Form(
        "f(prompts, responses, labels, **columns)",
        own={"responses": "response", "prompts": "prompt", "labels": "label"},
    ),
    Form(  # verl's; prompt_str is ours
        "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)",
        own={"solution_str": "response", "ground_truth": "label", "prompt_str": "prompt"},
        optional=("data_source", "extra_info"),
        per_row=True,
        with_values=True,
        read=lambda value: [value],
    ),
    Form(  # TRL's
        "f(prompts, completions, **columns)",
        own={"completions": "completion", "prompts": "raw_prompt"},
        raw_prompts=True,
        read=none_as_no_score,
    ),
    Form(  # OpenRLHF's
        "reward_func(queries, prompts, labels)",
        own={"queries": "query", "prompts": "prompt", "labels": "label"},
        optional=(),
        by_position=True,
        per_row=True,
        read=from_openrlhf,
    ),
)


@dataclass(frozen=True)
class RewardFunction:
    """A function of any form, called with rows and returning one value for each.

    Attributes:
        own: the parameters of its form that it gets -> the attribute of a row.
        inputs: the fields that it gets.
        options: arguments that it gets in every call.
        home: folder whose modules it imports.
    """

    function: Callable[..., Any]
    form: Form
    own: Mapping[str, str]
    inputs: InputSpec
    options: JsonObject
    home: Home | None

    @cached_property
    def is_async(self) -> bool:
        return any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))

    @property
    def mode(self) -> CallMode:
        if not self.form.per_row:
            return "list"
        return "one_async" if self.is_async else "one"

    def call(self, rows: Sequence[Row]) -> Any:
        """Return the values of rows, or what awaits them. In a list of a column None stands for rows without it."""
        columns = dict.fromkeys(name for row in rows for name in row.columns if self._gets(name))
        arguments = {name: [row.columns.get(name) for row in rows] for name in columns}
        arguments |= {name: [getattr(row, attribute) for row in rows] for name, attribute in self.own.items()}
        if self.form.with_values:
            arguments = {name: only for name, [only] in arguments.items()}
        if self.home is not None:
            self.home.enter()
        returned = self.function(**arguments, **self.options)
        return self._read_later(returned) if inspect.isawaitable(returned) else self.form.read(returned)

    async def call_async(self, rows: Sequence[Row]) -> Any:
        return await self.call(rows)

    async def _read_later(self, returned: Awaitable[Any]) -> Any:
        return self.form.read(await returned)

    def _gets(self, column: str) -> bool:
        """Return whether it takes a column; rows have columns for other functions, too."""
        optional = self.inputs.optional
        return column not in self.options and (optional is None or column in (*self.inputs.needed, *optional))


def is_message(value: Any) -> bool:
    """Return whether a value is a chat message: a role and a text, which may be null beside calls of tools."""
    if not (isinstance(value, dict) and isinstance(value.get("role"), str)):
        return False
    content = value.get("content")
    return isinstance(content, str) or (content is None and bool(value.get("tool_calls")))


def recognise(function: Callable[..., Any], options: JsonObject, home: Home | None) -> RewardFunction:
    """Return a function with its form. One without the parameters of a form may take prompts, responses and labels by
    position.

    Raises:
        BadFunction: it has no form, or does not take the options.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    names = {one.name: one.default is one.empty for one in parameters if one.kind in BY_NAME}
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    form = next((form for form in FORMS if next(iter(form.own)) in names), None)
    if form is None:
        try:
            signature.bind("prompts", "responses", "labels")
        except TypeError as error:
            expected = ", or ".join(form.shown for form in FORMS)
            raise BadFunction(f"takes {str(signature):.{MAX_SHOWN}}; expected {expected}") from error
        return recognise(lambda prompts, responses, labels: function(prompts, responses, labels), options, home)
    known = dict(zip(names, form.own.values(), strict=False)) if form.by_position else form.own
    for name in options:
        if name in known or not (takes_any or name in names):
            raise BadFunction(f"takes no option {name!r} of reward.options; its parameters are {', '.join(names)}")
    any_of = form.shown if takes_any else ""  # prompt_str is not verl's
    own = {name: attribute for name, attribute in known.items() if name in names or name in any_of}
    columns = [name for name in names if name not in (*known, *options)]
    needed = tuple(name for name in columns if names[name])
    optional = None
    if form.optional is not None or not takes_any:
        offered = columns if form.optional is None else [name for name in form.optional if takes_any or name in columns]
        optional = tuple(name for name in offered if name not in needed)
    return RewardFunction(function, form, own, InputSpec(needed, optional, form.raw_prompts), options, home)


class RewardHost:
    """The reward functions of a worker process.

    Args:
        functions: source, name and options of each.
    Attributes:
        description: the inputs of all functions together, and the mode of each.
    """

    def __init__(self, functions: Sequence[tuple[str, str, JsonObject]]):
        self._functions = []
        for source, name, options in functions:
            try:
                self._functions.append(recognise(load(source, name), options, home(source)))
            except BadFunction as error:
                raise BadFunction(str(error) if len(functions) == 1 else f"({name}) {error}") from error
        inputs = reduce(or_, [one.inputs for one in self._functions])
        self.description = {"inputs": asdict(inputs), "modes": [one.mode for one in self._functions]}

    def score(self, function: int, rows: Sequence[Sequence[Any]]) -> Any:
        """Return what calls a function with rows: a coroutine, or a function to call outside of the event loop."""
        called = self._functions[function]
        given = [Row(*row) for row in rows]
        return called.call_async(given) if called.is_async else partial(called.call, given)
