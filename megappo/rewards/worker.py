"""The worker process: `python -m megappo.rewards.worker FD PARENT_PID FILE FUNCTION` (FILE empty: a built-in function).

It reads pickled (prompts, responses, labels) from the socket FD until that closes, and answers each, and its own start,
with one JSON object: {"scores": [...]}, {"ready": true} or {"error": "..."}. It imports the standard library alone, so
it starts at once; the user's file imports what it likes.
"""

import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from megappo.lifetime import die_with
from megappo.rewards.builtin import BUILTIN


def main() -> None:
    descriptor, parent, file, name = sys.argv[1:]
    die_with(int(parent))
    os.set_inheritable(int(descriptor), False)  # else the user's own processes would keep the socket open
    connection = Connection(int(descriptor))
    function, error = _attempt(_load, file, name)
    reply: dict[str, Any] = {"error": error} if error else {"ready": True}
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the owner went: so does the worker
        while True:
            connection.send_bytes(json.dumps(reply).encode())
            if error:
                return
            rows = connection.recv()
            scores, error = _attempt(_score, function, *rows)
            reply = {"error": error} if error else {"scores": scores}


def _attempt(work: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """(result, ""), or (None, what went wrong)."""
    try:
        return work(*arguments), ""
    except _BadResult as error:
        return None, str(error)
    except BaseException as error:  # SystemExit too: user code must not end the worker without a word
        trace = "".join(traceback.format_exception(error)).rstrip()
        return None, f"raised {type(error).__name__}: {error}\n{trace}"


class _BadResult(Exception):
    """What user code gave is no use; the message goes on as it is."""


def _load(file: str, name: str) -> Callable[..., Any]:
    if not file:
        return BUILTIN[name]
    # The file can import its neighbours; they come last, so that they hide nothing.
    sys.path.append(os.path.dirname(file))
    spec = importlib.util.spec_from_file_location("megappo_user_reward", file)
    if spec is None or spec.loader is None:
        raise _BadResult("is not in a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        own = (key for key, value in vars(module).items() if getattr(value, "__module__", None) == spec.name)
        known = sorted(key for key in own if callable(vars(module)[key]) and not key.startswith("_"))
        raise _BadResult(f"does not exist: the file defines {', '.join(known) or 'no function'}")
    return function


def _score(function: Callable[..., Any], prompts: list[str], responses: list[str], labels: list) -> list[float]:
    result = function(prompts, responses, labels)
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__"):
        raise _BadResult(f"returned {type(result).__name__}; expected a list of {len(responses)} numbers")
    scores = list(result)
    if len(scores) != len(responses):
        raise _BadResult(f"returned {len(scores)} values for {len(responses)} responses; expected one each")
    return [_number(score, i) for i, score in enumerate(scores)]


def _number(score: Any, i: int) -> float:
    if not hasattr(score, "__float__"):
        raise _BadResult(f"returned {score!r:.80} (value {i}), a {type(score).__name__}; expected a number")
    try:
        number = float(score)
    except (TypeError, ValueError) as error:
        raise _BadResult(f"returned a {type(score).__name__} (value {i}) that is no single number: {error}") from error
    if not math.isfinite(number):
        raise _BadResult(f"returned {number} (value {i}); expected finite numbers")
    return number


if __name__ == "__main__":
    main()
