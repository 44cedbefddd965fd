"""The worker process: `python -m megappo.rewards.worker MEMORY_BYTES {SOURCE FUNCTION WEIGHT}...` (MEMORY_BYTES empty:
no limit; SOURCE: FILE.py, or a module's name; WEIGHT: factor of the function's scores).

Its standard input is a socket. From there it reads JSON objects, the fields of `forms.Rows`, until that closes, and
answers each, and its own start, with one JSON object: {"graded": [...]}, a `forms.Graded` for each response,
{"takes": ...}, the fields of `forms.Takes`, or {"error": "..."}. It imports the standard library alone, so it starts at
once; the user's file imports what it likes.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial, reduce
from importlib import import_module
from itertools import chain, islice
from numbers import Rational
from operator import or_
from typing import Any, NamedTuple

from megappo.rewards.builtin import ANSWERS
from megappo.rewards.forms import BadFunction, Graded, RewardFunction, Rows, Takes, recognised
from megappo.rewards.frames import receive, send
from megappo.rewards.user_code import attempt, limit_memory, load, named, own_connection

MAX_ROWS_BYTES = 2**62
LARGEST_FLOAT32 = 3.4028234663852886e38
MAX_SCORES = 64
"""Of one response."""
MAX_PARTS = 32
"""Of one response, beside its scores."""
MAX_NAME_CHARACTERS = 64
"""Of a part."""
MAX_ANSWER_CHARACTERS = 200
"""Of an answer: longer ones are told by their beginning."""
ANSWER = "pred"
"""Of a dictionary: the answer that was found in the response. verl's name."""


class Weighted(NamedTuple):
    """A function, its name, the factor of its scores, and of a built-in one what finds a response's answer."""

    name: str
    weight: float
    function: RewardFunction
    answer_of: Callable[[str], Any]


def main() -> None:
    limit, *rest = sys.argv[1:]
    specs = list(zip(rest[::3], rest[1::3], map(float, rest[2::3]), strict=True))
    connection = own_connection()
    if limit:
        limit_memory(int(limit))
    own_pid = os.getpid()
    functions, error = attempt(_load_all, specs)
    reply: dict[str, Any] = {"error": error} if error else {"takes": asdict(_taken(functions))}
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the owner went: so does the worker
        while True:
            send(connection, json.dumps(reply).encode())
            if error:
                return
            graded, error = attempt(_grade_all, functions, receive(connection, MAX_ROWS_BYTES))
            if os.getpid() != own_pid:  # a child that the function has forked must not answer, too
                os._exit(0)
            reply = {"error": error} if error else {"graded": graded}


def _load_all(specs: list[tuple[str, str, float]]) -> list[Weighted]:
    return [
        Weighted(name, weight, _of(specs, name, partial(_load, source, name)), _answer_of(source, name))
        for source, name, weight in specs
    ]


def _answer_of(source: str, name: str) -> Callable[[str], Any]:
    if f"{source}:{name}" not in ANSWERS:
        return lambda response: None
    module, _, function = ANSWERS[f"{source}:{name}"].partition(":")
    return getattr(import_module(module), function)


def _load(source: str, name: str) -> RewardFunction:
    return recognised(load(source, name))


def _taken(functions: list[Weighted]) -> Takes:
    return reduce(or_, [weighted.function.takes for weighted in functions])


def _grade_all(functions: list[Weighted], rows: bytes) -> list[Graded]:
    """What all functions together find of each of the rows; their scores have their weights."""
    of_functions = []
    for one in functions:
        own_rows = Rows(**json.loads(rows))  # which it may change
        graded = _of(functions, one.name, partial(_grade, one, own_rows))
        weighted = [[_number(one.weight * score, one.name) for score in of_row.scores] for of_row in graded]
        together = zip(weighted, graded, strict=True)
        of_functions.append([of_row._replace(scores=scores) for scores, of_row in together])
    return [_together(of_row) for of_row in zip(*of_functions, strict=True)]


def _together(of_row: Sequence[Graded]) -> Graded:
    scores = list(chain.from_iterable(one.scores for one in of_row))
    if len(scores) > MAX_SCORES:
        raise BadFunction(f"returned {len(scores)} scores together; expected 1 to {MAX_SCORES}")
    answer = next((one.answer for one in of_row if one.answer is not None), None)
    return Graded(scores, reduce(or_, [one.parts for one in of_row]), answer)


def _of(functions: Sequence[object], name: str, work: Callable[[], Any]) -> Any:
    """What a function's loading or call gives; of several, it is named where it is wrong."""
    try:
        return work()
    except BadFunction as error:
        raise BadFunction(f"({name}) {error}" if len(functions) > 1 else str(error)) from error


def _grade(weighted: Weighted, rows: Rows) -> list[Graded]:
    count = len(rows.responses)  # before the call, which may change the lists
    answers = [weighted.answer_of(response) for response in rows.responses]
    result = weighted.function(rows)
    if isinstance(result, str | bytes | dict | set | frozenset) or not hasattr(result, "__len__"):
        raise BadFunction(f"returned {type(result).__name__}; expected a list of {count} numbers")
    if len(result) != count:
        raise BadFunction(f"returned {len(result)} values for {count} responses; expected one each")
    graded = [_graded(value, i, answer) for i, (value, answer) in enumerate(zip(result, answers, strict=False))]
    if len(graded) != count:
        raise BadFunction(f"returned a {type(result).__name__} that says it has {count} values and gives {len(graded)}")
    for i, of_response in enumerate(graded):
        if len(of_response.scores) != len(graded[0].scores):
            found = f"{len(graded[0].scores)} scores (value 0) and {len(of_response.scores)} (value {i})"
            raise BadFunction(f"returned {found}; expected as many for each response")
    return graded


def _graded(value: Any, i: int, answer: Any) -> Graded:
    """Of a dictionary "score" counts, and its other numbers are told; of what is no number the answer alone.

    Args:
        answer: of a function that tells none itself.
    """
    if not isinstance(value, dict):
        return Graded(_numbers(value, i), {}, _as_answer(answer))
    if "score" not in value:
        raise BadFunction(f"returned a dictionary without 'score': {value!r:.80}")
    parts = {name: part for name, part in value.items() if name != "score" and hasattr(part, "__float__")}
    if len(parts) > MAX_PARTS or any(not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS for name in parts):
        found = f"{len(parts)} numbers beside 'score' (value {i}): {', '.join(map(str, parts)):.80}"
        expected = f"expected at most {MAX_PARTS}, with names of at most {MAX_NAME_CHARACTERS} characters"
        raise BadFunction(f"returned {found}; {expected}")
    numbers = {name: _number(part, f"value {i}, {name!r}") for name, part in parts.items()}
    return Graded(_numbers(value["score"], i), numbers, _as_answer(value.get(ANSWER)))


def _as_answer(found: Any) -> str | None:
    """What has an answer's own text; no list or the like."""
    return str(found)[:MAX_ANSWER_CHARACTERS] if isinstance(found, str | float | Rational) else None


def _numbers(score: Any, i: int) -> list[float]:
    """The scores of a response: of the list that was returned for it, or the one that was."""
    if not isinstance(score, list | tuple):
        return [_number(score, f"value {i}")]
    if not 1 <= len(score) <= MAX_SCORES:
        raise BadFunction(f"returned a list of {len(score)} scores (value {i}); expected 1 to {MAX_SCORES}")
    numbers = [_number(one, f"value {i}, score {j}") for j, one in enumerate(islice(score, MAX_SCORES))]
    _number(math.fsum(numbers), f"value {i}, the sum of its scores")
    return numbers


def _number(score: Any, place: str) -> float:
    if not hasattr(score, "__float__"):
        expected = "a number, or a list of them"
        raise BadFunction(f"returned {score!r:.80} ({place}), a {type(score).__name__}; expected {expected}")
    try:
        number = float(score)
    except Exception as error:
        raise BadFunction(
            f"returned a {type(score).__name__} ({place}) that is no single number, and no list: {named(error)}"
        ) from error
    if not math.isfinite(number):
        raise BadFunction(f"returned {number} ({place}); expected finite numbers")
    if abs(number) > LARGEST_FLOAT32:
        raise BadFunction(f"returned {number} ({place}), which is too large for a float32; expected up to 3.4e38")
    return number


if __name__ == "__main__":
    main()
