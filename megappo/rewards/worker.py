"""The worker process: `python -m megappo.rewards.worker MEMORY_BYTES {SOURCE FUNCTION WEIGHT}...` (MEMORY_BYTES empty:
no limit; SOURCE: FILE.py, or a module's name; WEIGHT: factor of the function's scores).

Its standard input is a socket. From there it reads JSON objects, the fields of `forms.Rows`, until that closes, and
answers each, and its own start, with one JSON object: {"graded": [...]}, a `forms.Graded` for each response,
{"takes": ...}, the fields of `forms.Takes`, or {"error": "..."}. It imports the standard library alone, so it starts at
once; the user's file imports what it likes.
"""

import importlib
import importlib.util
import json
import math
import os
import resource
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial, reduce
from itertools import chain, islice
from operator import or_
from types import ModuleType
from typing import Any, NamedTuple

from megappo.rewards.forms import BadFunction, Graded, RewardFunction, Rows, Takes, recognised
from megappo.rewards.frames import receive, send

MAX_ROWS_BYTES = 2**62
MAX_MESSAGE_CHARACTERS = 2000
MAX_FRAMES = 10
MAX_FRAME_CHARACTERS = 500
LARGEST_FLOAT32 = 3.4028234663852886e38
MAX_SCORES = 64
"""Of one response."""
MAX_PARTS = 32
"""Of one response, beside its scores."""
MAX_NAME_CHARACTERS = 64
"""Of a part."""
TELLING_BYTES = 2**26
"""Beyond the limit, to say that it was reached."""


class Weighted(NamedTuple):
    """A function, its name, and the factor of its scores."""

    name: str
    weight: float
    function: RewardFunction


def main() -> None:
    limit, *rest = sys.argv[1:]
    specs = list(zip(rest[::3], rest[1::3], map(float, rest[2::3]), strict=True))
    connection = _connection()
    if limit:
        _limit_memory(int(limit))
    own_pid = os.getpid()
    functions, error = _attempt(_load_all, specs)
    reply: dict[str, Any] = {"error": error} if error else {"takes": asdict(_taken(functions))}
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the owner went: so does the worker
        while True:
            send(connection, json.dumps(reply).encode())
            if error:
                return
            graded, error = _attempt(_grade_all, functions, receive(connection, MAX_ROWS_BYTES))
            if os.getpid() != own_pid:  # a child that the function has forked must not answer, too
                os._exit(0)
            reply = {"error": error} if error else {"graded": graded}


def _connection() -> socket.socket:
    """The socket on a descriptor of its own, which the user's processes do not inherit; they find an empty input."""
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    return connection


def _attempt(work: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """(result, ""), or (None, what went wrong)."""
    try:
        return work(*arguments), ""
    except BadFunction as error:
        return None, str(error)
    except BaseException as error:  # SystemExit too: user code must not end the worker without a word
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # what the error holds may be all that it may take
        return None, _told(error)


def _limit_memory(num_bytes: int) -> None:
    """Have the kernel refuse this process and those that it starts more memory of their own than so much each."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most != resource.RLIM_INFINITY:  # whoever started the run has set it: it can only be lowered
        num_bytes = min(num_bytes, most - TELLING_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes + TELLING_BYTES))


def _told(error: BaseException) -> str:
    """An exception, where it was raised and what it came of, at a length that can be read."""
    frames = [_cut(frame, MAX_FRAME_CHARACTERS) for frame in traceback.format_tb(error.__traceback__, -MAX_FRAMES)]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    origin = [f"It came of {_named(cause)}"] if cause else []
    return "\n".join([f"raised {_named(error)}", *(frame.rstrip() for frame in frames), *origin])


def _named(error: BaseException) -> str:
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message cannot be read: {type(another).__name__})"
    return f"{type(error).__name__}: {_cut(message, MAX_MESSAGE_CHARACTERS)}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]} ... ({len(text)} characters)"


def _load_all(specs: list[tuple[str, str, float]]) -> list[Weighted]:
    return [Weighted(name, weight, _of(specs, name, partial(_load, source, name))) for source, name, weight in specs]


def _taken(functions: list[Weighted]) -> Takes:
    return reduce(or_, [weighted.function.takes for weighted in functions])


def _grade_all(functions: list[Weighted], rows: bytes) -> list[Graded]:
    """What all functions together find of each of the rows; their scores have their weights."""
    of_functions = []
    for one in functions:
        own_rows = Rows(**json.loads(rows))  # which it may change
        graded = _of(functions, one.name, partial(_grade, one.function, own_rows))
        weighted = [[_number(one.weight * score, one.name) for score in of_row.scores] for of_row in graded]
        of_functions.append([Graded(scores, of_row.parts) for scores, of_row in zip(weighted, graded, strict=True)])
    return [_together(of_row) for of_row in zip(*of_functions, strict=True)]


def _together(of_row: Sequence[Graded]) -> Graded:
    scores = list(chain.from_iterable(one.scores for one in of_row))
    if len(scores) > MAX_SCORES:
        raise BadFunction(f"returned {len(scores)} scores together; expected 1 to {MAX_SCORES}")
    return Graded(scores, reduce(or_, [one.parts for one in of_row]))


def _of(functions: Sequence[object], name: str, work: Callable[[], Any]) -> Any:
    """What a function's loading or call gives; of several, it is named where it is wrong."""
    try:
        return work()
    except BadFunction as error:
        raise BadFunction(f"({name}) {error}" if len(functions) > 1 else str(error)) from error


def _load(source: str, name: str) -> RewardFunction:
    module = _from_file(source) if source.endswith(".py") else importlib.import_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        own = (key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
        known = sorted(key for key in own if callable(vars(module)[key]) and not key.startswith("_"))
        raise BadFunction(f"does not exist: the file defines {_cut(', '.join(known), 1000) or 'no function'}")
    return recognised(function)


def _from_file(file: str) -> ModuleType:
    # The file can import its neighbours; they come last, so that they hide nothing.
    sys.path.append(os.path.dirname(file))
    spec = importlib.util.spec_from_file_location("megappo_user_reward", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _grade(function: RewardFunction, rows: Rows) -> list[Graded]:
    count = len(rows.responses)  # before the call, which may change the lists
    result = function(rows)
    if isinstance(result, str | bytes | dict | set | frozenset) or not hasattr(result, "__len__"):
        raise BadFunction(f"returned {type(result).__name__}; expected a list of {count} numbers")
    if len(result) != count:
        raise BadFunction(f"returned {len(result)} values for {count} responses; expected one each")
    graded = [_graded(value, i) for i, value in enumerate(islice(result, count))]
    if len(graded) != count:
        raise BadFunction(f"returned a {type(result).__name__} that says it has {count} values and gives {len(graded)}")
    for i, of_response in enumerate(graded):
        if len(of_response.scores) != len(graded[0].scores):
            found = f"{len(graded[0].scores)} scores (value 0) and {len(of_response.scores)} (value {i})"
            raise BadFunction(f"returned {found}; expected as many for each response")
    return graded


def _graded(value: Any, i: int) -> Graded:
    """Of a dictionary "score" counts, and its other numbers are told; what is no number, such as a text, is not."""
    if not isinstance(value, dict):
        return Graded(_numbers(value, i), {})
    if "score" not in value:
        raise BadFunction(f"returned a dictionary without 'score': {value!r:.80}")
    parts = {name: part for name, part in value.items() if name != "score" and hasattr(part, "__float__")}
    if len(parts) > MAX_PARTS or any(not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS for name in parts):
        found = f"{len(parts)} numbers beside 'score' (value {i}): {', '.join(map(str, parts)):.80}"
        expected = f"expected at most {MAX_PARTS}, with names of at most {MAX_NAME_CHARACTERS} characters"
        raise BadFunction(f"returned {found}; {expected}")
    numbers = {name: _number(part, f"value {i}, {name!r}") for name, part in parts.items()}
    return Graded(_numbers(value["score"], i), numbers)


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
            f"returned a {type(score).__name__} ({place}) that is no single number, and no list: {_named(error)}"
        ) from error
    if not math.isfinite(number):
        raise BadFunction(f"returned {number} ({place}); expected finite numbers")
    if abs(number) > LARGEST_FLOAT32:
        raise BadFunction(f"returned {number} ({place}), which is too large for a float32; expected up to 3.4e38")
    return number


if __name__ == "__main__":
    main()
