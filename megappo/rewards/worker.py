"""The worker process: `python -m megappo.rewards.worker MEMORY_BYTES {SOURCE FUNCTION WEIGHT}...` (MEMORY_BYTES empty:
no limit; SOURCE: FILE.py, or a module's name; WEIGHT: factor of the function's scores).

Its standard input is a socket. From there it reads JSON objects, the fields of `forms.Rows`, until that closes, and
answers each, and its own start, with one JSON object: {"scores": [[...], ...]}, a list for each response,
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

from megappo.rewards.forms import BadFunction, RewardFunction, Rows, Takes, recognised
from megappo.rewards.frames import receive, send

MAX_ROWS_BYTES = 2**62
MAX_MESSAGE_CHARACTERS = 2000
MAX_FRAMES = 10
MAX_FRAME_CHARACTERS = 500
LARGEST_FLOAT32 = 3.4028234663852886e38
MAX_SCORES = 64
"""Of one response."""
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
            scores, error = _attempt(_score_all, functions, receive(connection, MAX_ROWS_BYTES))
            if os.getpid() != own_pid:  # a child that the function has forked must not answer, too
                os._exit(0)
            reply = {"error": error} if error else {"scores": scores}


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


def _score_all(functions: list[Weighted], rows: bytes) -> list[list[float]]:
    """The scores of all functions, each with its weight, for each of the rows."""
    of_functions = []
    for one in functions:
        own_rows = Rows(**json.loads(rows))  # which it may change
        scores = _of(functions, one.name, partial(_score, one.function, own_rows))
        of_functions.append([[one.weight * score for score in of_row] for of_row in scores])
    scores = [list(chain.from_iterable(of_row)) for of_row in zip(*of_functions, strict=True)]
    if scores and len(scores[0]) > MAX_SCORES:
        raise BadFunction(f"returned {len(scores[0])} scores together; expected 1 to {MAX_SCORES}")
    return scores


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


def _score(function: RewardFunction, rows: Rows) -> list[list[float]]:
    count = len(rows.responses)  # before the call, which may change the lists
    result = function(rows)
    if isinstance(result, str | bytes | dict | set | frozenset) or not hasattr(result, "__len__"):
        raise BadFunction(f"returned {type(result).__name__}; expected a list of {count} numbers")
    if len(result) != count:
        raise BadFunction(f"returned {len(result)} values for {count} responses; expected one each")
    scores = [_numbers(score, i) for i, score in enumerate(islice(result, count))]
    if len(scores) != count:
        raise BadFunction(f"returned a {type(result).__name__} that says it has {count} values and gives {len(scores)}")
    for i, of_response in enumerate(scores):
        if len(of_response) != len(scores[0]):
            found = f"{len(scores[0])} scores (value 0) and {len(of_response)} (value {i})"
            raise BadFunction(f"returned {found}; expected as many for each response")
    return scores


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
