"""The worker process: `python -m megappo.userland.worker MEMORY_BYTES` (empty: no limit).

Its standard input is a socket with messages of JSON. The first is {"functions": [[SOURCE, NAME, WEIGHT, OPTIONS],
...]}, with FILE.py or a module's name as SOURCE and the factor of the function's scores as WEIGHT. It answers with
{"takes": ..., "ways": [...]}, the fields of `forms.Takes` and each function's `forms.Way`. Then it is called, until the
socket closes: {"function": its number, "rows": the fields of `forms.Rows`, "seconds": the time limit of async calls},
and answers with {"graded": [...]}, a `forms.Graded` for each row, in one message for all rows, or in one for each, as
the function's way is. In place of any there may be {"error": "...", "late": whether it is one of time}. It imports the
standard library alone, so it starts at once; the user's file imports what it likes.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial, reduce
from itertools import islice
from numbers import Rational
from operator import index, or_
from typing import Any, NamedTuple

from megappo.user_modules import Home
from megappo.userland.builtin import beside
from megappo.userland.forms import BadFunction, Call, Graded, RewardFunction, Rows, Step, awaited, recognised, runner
from megappo.userland.frames import receive, send
from megappo.userland.user_code import attempt, home, limit_memory, load, named, own_connection

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
LATE = object()
"""In place of what an async call returns, that has had its time."""
ANSWER = "pred"
"""Of a dictionary: the answer that was found in the response. verl's name."""
SCORE, LOSS_WEIGHT, STEP_SCORES = "score", "loss_weight", "step_scores"
"""Of a dictionary: what training depends on. Its other numbers are told."""


class Weighted(NamedTuple):
    """A function, its name, the factor of its scores, the folder of its modules, and of a built-in one what finds a
    response's answer."""

    name: str
    weight: float
    function: RewardFunction
    home: Home | None
    answer_of: Callable[[str], Any]


def main() -> None:
    [limit] = sys.argv[1:]
    connection = own_connection()
    if limit:
        limit_memory(int(limit))
    own_pid = os.getpid()
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the owner went: so does the worker
        specs = json.loads(receive(connection, MAX_ROWS_BYTES))["functions"]
        functions, error = attempt(_load_all, specs)
        send(connection, json.dumps(_error(error) if error else _told(functions)).encode())
        while functions:
            called = json.loads(receive(connection, MAX_ROWS_BYTES))
            for reply in _replies(functions, called["function"], Rows(**called["rows"]), called["seconds"]):
                if os.getpid() != own_pid:  # a child that the function has forked must not answer, too
                    os._exit(0)
                send(connection, json.dumps(reply).encode())


def _load_all(specs: list[list[Any]]) -> list[Weighted]:
    names = [name for _, name, _, _ in specs]
    return [
        Weighted(
            name,
            weight,
            _of(names, name, partial(_load, source, name, options)),
            home(source),
            beside(f"{source}:{name}", "answer") or (lambda response: None),
        )
        for source, name, weight, options in specs
    ]


def _load(source: str, name: str, options: Mapping[str, Any]) -> RewardFunction:
    return recognised(load(source, name), options)


def _told(functions: list[Weighted]) -> dict[str, Any]:
    takes = reduce(or_, [one.function.takes for one in functions])
    return {"takes": asdict(takes), "ways": [one.function.way for one in functions]}


def _error(reason: str, *, late: bool = False) -> dict[str, Any]:
    return {"error": reason, "late": late}


def _replies(functions: list[Weighted], number: int, rows: Rows, seconds: float) -> Iterator[dict[str, Any]]:
    """What a function finds of rows."""
    names, weighted = [one.name for one in functions], functions[number]
    function = weighted.function
    if weighted.home is not None:
        weighted.home.enter()
    responses = [[one] for one in rows.responses] if function.form.per_row else [list(rows.responses)]
    calls = function.calls(rows)
    results = _at_once(function, calls, seconds) if function.way == "rows" else map(partial(_one, function), calls)
    for result, of_call in zip(results, responses, strict=True):
        graded, error = attempt(_of, names, weighted.name, partial(_grade, weighted, result, of_call))
        late = graded is LATE
        yield _error(error, late=late) if error or late else {"graded": graded}


def _one(function: RewardFunction, call: Call) -> Callable[[], Any]:
    """What calls it, and gives what it returns."""

    def result() -> Any:
        returned = awaited(function.function(**call))
        return [returned] if function.form.per_row else returned

    return result


def _at_once(function: RewardFunction, calls: Sequence[Call], seconds: float) -> Iterator[Callable[[], Any]]:
    """Makes all calls; each of what comes waits for the result of one."""
    import asyncio  # see `forms.runner`

    async def one(call: Call) -> Any:
        return await function.function(**call)

    async def begin() -> list[asyncio.Task]:
        return [asyncio.create_task(one(call)) for call in calls]

    async def finish(task: asyncio.Task, deadline: float) -> Any:
        await asyncio.wait([task], timeout=max(0.0, deadline - time.monotonic()))
        if not task.done():
            task.cancel()
            return LATE
        return [task.result()]

    deadline = time.monotonic() + seconds
    for task in runner().run(begin()):
        yield lambda task=task: runner().run(finish(task, deadline))


def _of(names: Sequence[str], name: str, work: Callable[[], Any]) -> Any:
    """What a function's loading or call gives; of several, it is named where it is wrong."""
    try:
        return work()
    except BadFunction as error:
        raise BadFunction(f"({name}) {error}" if len(names) > 1 else str(error)) from error


def _grade(weighted: Weighted, call: Callable[[], Any], responses: Sequence[str]) -> Any:
    """What a call finds of its responses, or LATE; the scores have the function's weight."""
    answers = list(map(weighted.answer_of, responses))
    result = call()
    if result is LATE:
        return LATE
    return [_scaled(one, weighted) for one in _checked(result, answers, responses)]


def _scaled(graded: Graded, weighted: Weighted) -> Graded:
    def scaled(score: float) -> float:
        return _number(weighted.weight * score, weighted.name)

    steps = [[(end, scaled(score)) for end, score in of_score] for of_score in graded.steps]
    return graded._replace(scores=list(map(scaled, graded.scores)), steps=steps)


def _checked(result: Any, answers: Sequence[Any], responses: Sequence[str]) -> list[Graded]:
    """What a function has returned of these responses."""
    count = len(responses)
    if isinstance(result, str | bytes | dict | set | frozenset) or not hasattr(result, "__len__"):
        raise BadFunction(f"returned {type(result).__name__}; expected a list of {count} numbers")
    if len(result) != count:
        raise BadFunction(f"returned {len(result)} values for {count} responses; expected one each")
    values = zip(result, answers, responses, strict=False)
    graded = [_graded(value, i, answer, response) for i, (value, answer, response) in enumerate(values)]
    if len(graded) != count:
        raise BadFunction(f"returned a {type(result).__name__} that says it has {count} values and gives {len(graded)}")
    for i, of_response in enumerate(graded):
        if len(of_response.scores) != len(graded[0].scores):
            found = f"{len(graded[0].scores)} scores (value 0) and {len(of_response.scores)} (value {i})"
            raise BadFunction(f"returned {found}; expected as many for each response")
    return graded


def _graded(value: Any, i: int, answer: Any, response: str) -> Graded:
    """Of a dictionary "score", "loss_weight" and "step_scores" count, and its other numbers are told; of what is no
    number the answer alone.

    Args:
        answer: of a function that tells none itself.
    """
    if not isinstance(value, dict):
        return Graded(_numbers(value, i), {}, _as_answer(answer))
    if SCORE not in value:
        raise BadFunction(f"returned a dictionary without 'score': {value!r:.80}")
    own = (SCORE, LOSS_WEIGHT, STEP_SCORES)
    parts = {name: part for name, part in value.items() if name not in own and hasattr(part, "__float__")}
    if len(parts) > MAX_PARTS or not all(map(is_part_name, parts)):
        found = f"{len(parts)} numbers beside 'score' (value {i}): {', '.join(map(str, parts)):.80}"
        expected = f"expected at most {MAX_PARTS}, with names of at most {MAX_NAME_CHARACTERS} printable characters"
        raise BadFunction(f"returned {found}; {expected}")
    numbers = {name: _number(part, f"value {i}, {name!r}") for name, part in parts.items()}
    graded = Graded(_numbers(value[SCORE], i), numbers, _as_answer(value.get(ANSWER)))
    if LOSS_WEIGHT in value:
        graded = graded._replace(loss_weight=_loss_weight(value[LOSS_WEIGHT], f"value {i}, {LOSS_WEIGHT!r}"))
    return _with_steps(graded, value[STEP_SCORES], i, response) if STEP_SCORES in value else graded


def _loss_weight(weight: Any, place: str) -> float:
    number = _number(weight, place)
    if number < 0:
        raise BadFunction(f"returned {number} ({place}); expected 0 or more")
    return number


def _with_steps(graded: Graded, steps: Any, i: int, response: str) -> Graded:
    place, length = f"value {i}, {STEP_SCORES!r}", len(response)
    if len(graded.scores) > 1:
        raise BadFunction(f"returned a list of {len(graded.scores)} scores beside steps ({place}); expected one score")
    if not isinstance(steps, list | tuple):
        raise BadFunction(f"returned {steps!r:.80} ({place}); expected a list of [end, score]")
    found: list[Step] = []
    for j, step in enumerate(steps):
        found.append(_step(step, f"{place}, step {j}", found[-1][0] if found else 0, length))
    _number(math.fsum([*graded.scores, *(score for _, score in found)]), f"{place}, their sum with the score")
    return graded._replace(steps=[found])


def _step(step: Any, place: str, last: int, length: int) -> Step:
    """A step behind one that ends at `last`."""
    if not isinstance(step, list | tuple) or len(step) != 2 or not hasattr(step[0], "__index__"):
        raise BadFunction(f"returned {step!r:.80} ({place}); expected [end, score], with a whole number as end")
    if not last < (end := index(step[0])) <= length:
        expected = f"above {last}, where the step before ends, and at most {length}, the characters that there are"
        raise BadFunction(f"returned a step that ends at {end} ({place}); expected an end {expected}")
    return end, _number(step[1], place)


def is_part_name(name: object) -> bool:
    """Whether a number beside the score may have it."""
    return isinstance(name, str) and len(name) <= MAX_NAME_CHARACTERS and name.isprintable()


def _as_answer(found: Any) -> str | None:
    """What has an answer's own text; no list or the like."""
    if not isinstance(found, str | float | Rational):
        return None
    return str(found)[:MAX_ANSWER_CHARACTERS].encode(errors="replace").decode()  # half a character is none in UTF-8


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
