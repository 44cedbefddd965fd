"""The reward functions of a worker process: how they are called, and their results as JSON. Uses the standard library
alone."""

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial, reduce
from numbers import Rational
from operator import index, or_
from typing import Any

from megappo.userland.signatures import Row, recognise
from megappo.userland.user_code import BadFunction, home, load, named

MAX_ANSWER_CHARACTERS = 200
"""Length at which an answer is cut."""
GRADERS = "megappo.userland.graders."
ANSWER = "pred"
"""The key of the answer that was found in the response, in a dictionary that a function returns. verl's name."""
SCORE, LOSS_WEIGHT, STEP_SCORES = "score", "loss_weight", "step_scores"
"""The keys that training depends on. The other numbers of a dictionary become metrics."""


class RewardHost:
    """Reward functions.

    Args:
        functions: source, name, factor of the scores, and options of each.
    Attributes:
        description: the inputs of all functions together, and the mode of each.
    """

    def __init__(self, functions: Sequence[tuple[str, str, float, Mapping[str, Any]]]):
        self._functions = [HostedFunction(*one, is_only=len(functions) == 1) for one in functions]
        inputs = reduce(or_, [one.function.inputs for one in self._functions])
        modes = [one.function.mode for one in self._functions]
        self.description = {"inputs": asdict(inputs), "modes": modes}

    def score(self, function: int, rows: Sequence[Sequence[Any]]) -> Any:
        """Return what calls a function with rows, a coroutine if it is async."""
        return self._functions[function].work([Row(*row) for row in rows])


class HostedFunction:
    """A reward function.

    Args:
        weight: factor of its scores.
        is_only: there are no others; else its errors name it.
    """

    def __init__(self, source: str, name: str, weight: float, options: Mapping[str, Any], *, is_only: bool):
        self._prefix = "" if is_only else f"({name}) "
        self._weight = weight
        self._home = home(source)
        try:
            self.function = recognise(load(source, name), options)
        except BadFunction as error:
            raise BadFunction(f"{self._prefix}{error}") from error
        self._answer_of: Callable[[str], Any] = lambda response: None
        if source.startswith(GRADERS):
            self._answer_of = getattr(importlib.import_module(source), f"{name}_answer", self._answer_of)

    def work(self, rows: Sequence[Row]) -> Any:
        """Return what scores rows: a coroutine, or a function to call outside of the event loop."""
        return self._score_async(rows) if self.function.is_async else partial(self._score, rows)

    def _score(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        result = self._call(rows)
        if inspect.isawaitable(result):
            result = asyncio.get_event_loop().run_until_complete(_finished(result))
        return self._graded(result, rows)

    async def _score_async(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        return self._graded(await self._call(rows), rows)

    def _call(self, rows: Sequence[Row]) -> Any:
        if self._home is not None:
            self._home.enter()
        return self.function.function(**self.function.arguments(rows))

    def _graded(self, result: Any, rows: Sequence[Row]) -> list[dict[str, Any]]:
        answers = [self._answer_of(row.response) for row in rows]
        values = [result] if self.function.form.per_row else result
        try:
            return graded(values, answers, self._weight)
        except BadFunction as error:
            raise BadFunction(f"{self._prefix}{error}") from error


async def _finished(result: Any) -> Any:
    return await result


def graded(values: Any, answers: Sequence[Any], weight: float) -> list[dict[str, Any]]:
    """Return what a function returned for some responses as the fields of `grades.Graded`, which checks them.

    Args:
        answers: what a built-in function finds as the answer of each response; None if nothing.
        weight: factor of the scores.
    Raises:
        BadFunction: it is no list with a number, a list of numbers or a dictionary for each response.
    """
    expected = len(answers)
    if isinstance(values, str | bytes | dict | set | frozenset) or not hasattr(values, "__len__"):
        raise BadFunction(f"returned {type(values).__name__}; expected a list of {expected} numbers")
    values = list(values)
    if len(values) != expected:
        raise BadFunction(f"returned {len(values)} values for {expected} responses; expected one each")
    return [_fields(value, f"value {i}", answers[i], weight) for i, value in enumerate(values)]


def _fields(value: Any, place: str, answer: Any, weight: float) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {"scores": _numbers(value, place, weight), "parts": {}, "answer": _as_text(answer)}
    if SCORE not in value:
        raise BadFunction(f"returned a dictionary without 'score': {value!r:.80}")
    others = {name: value[name] for name in value if name not in (SCORE, LOSS_WEIGHT, STEP_SCORES)}
    numbers = {name: other for name, other in others.items() if hasattr(other, "__float__")}
    if not all(isinstance(name, str) for name in numbers):
        raise BadFunction(f"returned a number beside 'score' whose name is no text ({place}): {list(numbers)!r:.80}")
    fields = {
        "scores": _numbers(value[SCORE], place, weight),
        "parts": {name: _number(number, f"{place}, {name!r}") for name, number in numbers.items()},
        "answer": _as_text(value.get(ANSWER)),
    }
    if LOSS_WEIGHT in value:
        fields["loss_weight"] = _number(value[LOSS_WEIGHT], f"{place}, {LOSS_WEIGHT!r}")
    if STEP_SCORES in value:
        fields["steps"] = [_steps(value[STEP_SCORES], f"{place}, {STEP_SCORES!r}", weight)]
    return fields


def _numbers(score: Any, place: str, weight: float) -> list[float]:
    if not isinstance(score, list | tuple):
        return [weight * _number(score, place)]
    return [weight * _number(one, f"{place}, score {i}") for i, one in enumerate(score)]


def _steps(steps: Any, place: str, weight: float) -> list[tuple[int, float]]:
    if not isinstance(steps, list | tuple):
        raise BadFunction(f"returned {steps!r:.80} ({place}); expected a list of [end, score]")
    found = []
    for i, step in enumerate(steps):
        if not isinstance(step, list | tuple) or len(step) != 2 or not hasattr(step[0], "__index__"):
            expected = "expected [end, score], with a whole number as end"
            raise BadFunction(f"returned {step!r:.80} ({place}, step {i}); {expected}")
        found.append((index(step[0]), weight * _number(step[1], f"{place}, step {i}")))
    return found


def _number(value: Any, place: str) -> float:
    if not hasattr(value, "__float__"):
        kind = type(value).__name__
        raise BadFunction(f"returned {value!r:.80} ({place}), a {kind}; expected a number, or a list of them")
    try:
        return float(value)
    except Exception as error:
        found = f"a {type(value).__name__} ({place}) that is no single number, and no list"
        raise BadFunction(f"returned {found}: {named(error)}") from error


def _as_text(answer: Any) -> str | None:
    """Return an answer's own text; None for lists and the like."""
    if not isinstance(answer, str | float | Rational):
        return None
    return str(answer)[:MAX_ANSWER_CHARACTERS].encode(errors="replace").decode()  # UTF-8 has no half of a character
