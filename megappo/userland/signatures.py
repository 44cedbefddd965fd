"""The signatures of reward functions, this project's, verl's, TRL's and OpenRLHF's, called in a worker process.

Worker processes import this, so it uses the standard library alone.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
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
        by_environment = self.by_environment + other.by_environment
        raw_prompts = self.raw_prompts or other.raw_prompts
        return InputSpec(needed, optional, raw_prompts, by_environment, self.tools + other.tools)


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
    def completion(self) -> str | list[dict[str, str]]:
        """The response in the raw prompt's format: text after text, a message after messages."""
        is_text = isinstance(self.raw_prompt, str)
        return self.response if is_text else [{"role": "assistant", "content": self.response}]


@dataclass(frozen=True)
class Form:
    """A form of reward functions.

    Attributes:
        shown: the form as messages show it.
        own: parameters that are no columns -> the attribute of a row. A function may leave out any but the first one,
            by which its form is recognised.
        if_named: parameters that **kwargs does not get.
        per_row: it is called with one row, not with lists.
        optional: the columns that it gets without needing them; None: any.
        raw_prompts: see `InputSpec`.
    """

    shown: str
    own: Mapping[str, str]
    if_named: tuple[str, ...] = ()
    per_row: bool = False
    optional: tuple[str, ...] | None = None
    raw_prompts: bool = False


FORMS = (
    Form(
        "f(prompts, responses, labels, **columns)",
        own={"responses": "response", "prompts": "prompt", "labels": "label"},
    ),
    Form(  # verl's; prompt_str is ours
        "compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)",
        own={"solution_str": "response", "ground_truth": "label", "prompt_str": "prompt"},
        if_named=("prompt_str",),
        per_row=True,
        optional=("data_source", "extra_info"),
    ),
    Form(  # TRL's
        "f(prompts, completions, **columns)",
        own={"completions": "completion", "prompts": "raw_prompt"},
        raw_prompts=True,
    ),
)

OPENRLHF = "reward_func(queries, prompts, labels)"
"""OpenRLHF's form, as messages show it; `queries` are prompts with their responses."""


@dataclass(frozen=True)
class RewardFunction:
    """A function and its form.

    Attributes:
        parameters: name -> whether it has no default; without the options.
        takes_any: it has **kwargs.
        options: arguments that it gets in every call.
        home: folder whose modules it imports.
    """

    function: Callable[..., Any]
    form: Form
    parameters: Mapping[str, bool]
    takes_any: bool
    options: JsonObject
    home: Home | None

    @cached_property
    def inputs(self) -> InputSpec:
        """The fields that it gets."""
        columns = [name for name in self.parameters if name not in self.form.own]
        needed = tuple(name for name in columns if self.parameters[name])
        optional = None
        if self.form.optional is not None or not self.takes_any:
            names = columns if self.form.optional is None else self.form.optional
            optional = tuple(name for name in names if self._accepts(name) and name not in needed)
        return InputSpec(needed, optional, self.form.raw_prompts)

    @cached_property
    def mode(self) -> CallMode:
        if not self.form.per_row:
            return "list"
        return "one_async" if self.is_async else "one"

    @cached_property
    def is_async(self) -> bool:
        return any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))

    def call(self, rows: Sequence[Row]) -> Any:
        """Call it with rows: one, if the form is called per row. In a list of a column None stands for rows without
        it."""
        columns = dict.fromkeys(name for row in rows for name in row.columns)
        lists = {name: [row.columns.get(name) for row in rows] for name in columns if self._gets(name)}
        for name, attribute in self.form.own.items():
            if self._accepts(name):
                lists[name] = [getattr(row, attribute) for row in rows]
        arguments = {name: values[0] for name, values in lists.items()} if self.form.per_row else lists
        if self.home is not None:
            self.home.enter()
        return self._scored(self.function(**arguments, **self.options))

    async def call_async(self, rows: Sequence[Row]) -> Any:
        return self._scored(await self.call(rows))

    def _scored(self, returned: Any) -> Any:
        """Return what the function returned; TRL's form returns None for a row that it does not score."""
        if self.form.raw_prompts and isinstance(returned, list):
            return [NO_SCORE if one is None else one for one in returned]
        return returned

    def _gets(self, column: str) -> bool:
        """Return whether it takes a column; rows have columns for other functions, too."""
        needed = self.inputs.needed
        optional = self.inputs.optional
        return column not in self.options and (optional is None or column in (*needed, *optional))

    def _accepts(self, name: str) -> bool:
        return name in self.parameters or (self.takes_any and name not in self.form.if_named)


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
    for form in FORMS:
        if next(iter(form.own)) not in names:
            continue
        for name in options:
            if name in form.own or not (takes_any or name in names):
                raise BadFunction(f"takes no option {name!r} of reward.options; its parameters are {', '.join(names)}")
        others = {name: is_needed for name, is_needed in names.items() if name not in options}
        return RewardFunction(function, form, others, takes_any, options, home)
    if "queries" in names:
        return recognise(_of_openrlhf(function), options, home)
    try:
        signature.bind("prompts", "responses", "labels")
    except TypeError as error:
        expected = ", or ".join([*(form.shown for form in FORMS), OPENRLHF])
        raise BadFunction(f"takes {str(signature):.{MAX_SHOWN}}; expected {expected}") from error
    return recognise(lambda prompts, responses, labels: function(prompts, responses, labels), options, home)


def _of_openrlhf(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in verl's form for one of OpenRLHF's, which gets lists of one text and returns lists or tensors
    of one number."""

    def score(solution_str: str, ground_truth: Any, prompt_str: str) -> Any:
        returned = function([prompt_str + solution_str], [prompt_str], [ground_truth])
        if not isinstance(returned, Mapping):
            return _only(returned)
        logs = {name: _only(values) for name, values in (returned.get("extra_logs") or {}).items()}
        return {**logs, "score": _only(returned["rewards"])}

    return score


def _only(values: Any) -> Any:
    """Return the number in a list or tensor of one; anything else as it is."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    return plain[0] if isinstance(plain, list) and len(plain) == 1 else plain


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
