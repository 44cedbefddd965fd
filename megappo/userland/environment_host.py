"""The environments of a worker process. Uses the standard library alone."""

import asyncio
import inspect
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from megappo.userland.signatures import InputSpec
from megappo.userland.user_code import BadFunction, load

METHODS = ("reset", "step")
MAX_NAME_CHARACTERS = 64
STACK_BYTES = 2**20
"""Stack of a thread: all of it counts as memory of the process."""
Messages = list[dict[str, str]]


class EnvironmentHost:
    """Any number of environments, each with its number.

    Args:
        source: FILE.py, or a module's name.
        name: of a class, or with arguments of a function that returns one.
        seconds: time limit of a call.
    Attributes:
        description: the class's inputs.
    """

    def __init__(self, source: str, name: str, arguments: Sequence[Any], seconds: float):
        threading.stack_size(STACK_BYTES)
        self._make = load(source, name)
        if arguments:
            self._make = self._make(*arguments)
        missing = [method for method in METHODS if not callable(getattr(self._make, method, None))]
        if missing:
            raise BadFunction(f"has no {' and no '.join(missing)}: expected a class with reset(row) and step(message)")
        self.description = asdict(_inputs(self._make))
        self._seconds = seconds
        self._environments: dict[int, Any] = {}
        self._closed_early: set[int] = set()
        self._calls: dict[int, asyncio.Task] = {}

    async def reset(self, number: int, row: dict[str, Any]) -> Messages:
        """Make an environment and begin its episode, unless it is closed meanwhile."""
        with self._call_of(number):
            environment = await in_thread(self._make)
            if number in self._closed_early:
                await _closed(environment)
                return []
            self._environments[number] = environment
            return messages_of(await called(environment.reset, row))

    async def step(self, number: int, message: dict[str, Any]) -> Any:
        """Return the environment's turn: messages, reward or rewards, whether it is done, further numbers by name."""
        with self._call_of(number):
            return _turn(await called(self._environments[number].step, message))

    async def close(self, number: int) -> None:
        """Close an environment. Its call in progress, which nobody waits for any more, is cancelled."""
        call = self._calls.get(number)
        if call is not None and number not in self._environments:  # it is being made
            self._closed_early.add(number)
            await asyncio.wait([call])
        elif call is not None:
            call.cancel()
            await asyncio.wait([call], timeout=self._seconds / 2)  # one that goes on leaves time to close
        await _closed(self._environments.pop(number, None))

    @contextmanager
    def _call_of(self, number: int) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._calls[number] = task
        try:
            yield
        finally:
            del self._calls[number]


def _inputs(make: Callable[[], Any]) -> InputSpec:
    """Return the `columns` that a class names, all that there are if it names none, and its `tools`."""
    columns, tools = getattr(make, "columns", None), getattr(make, "tools", [])
    try:
        is_json = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools) and json.dumps(tools)
    except (TypeError, ValueError, RecursionError):
        is_json = False
    if not is_json:
        raise BadFunction(f"has tools = {tools!r:.200}; expected a list of JSON schemas")
    if columns is None:
        return InputSpec(optional=None, raw_prompts=True, tools=tuple(tools))
    if not isinstance(columns, list | tuple) or not all(isinstance(name, str) for name in columns):
        raise BadFunction(f"has columns = {columns!r:.80}; expected a tuple of names")
    needed = tuple(columns)
    return InputSpec(needed, raw_prompts=True, by_environment=needed, tools=tuple(tools))


async def _closed(environment: Any) -> None:
    if hasattr(environment, "close"):
        await called(environment.close)


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in the end. A plain function has a thread of its own, which may never end."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    result = await in_thread(function, *arguments)
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a plain function in a thread of its own; `asyncio.to_thread` has too few for those that hang."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future = loop.create_future()

    def settle(*outcome: Any) -> None:
        if not done.done():  # else it was too late
            done.set_result(outcome)

    def run() -> None:
        try:
            outcome = (function(*arguments), None)
        except BaseException as error:
            outcome = (None, error)
        loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="environment-call", daemon=True).start()
    result, error = await done
    if error is not None:
        raise error
    return result


def messages_of(observation: Any) -> Messages:
    """Return an observation as messages: None is none, a text one of the user's.

    Raises:
        BadFunction: it is something else.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        observation = {"role": "user", "content": observation}
    messages = [observation] if isinstance(observation, dict) else observation
    found = f"returned the observation {observation!a:.200}"
    if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
        raise BadFunction(f"{found}; expected a text, None, or messages {{'role': str, 'content': str}}")
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadFunction(f"{found}, which is no JSON: {error}") from error
    return list(messages)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _turn(result: Any) -> tuple[Messages, float | list[float], bool, dict[str, float]]:
    if not isinstance(result, tuple | list) or len(result) not in (3, 4):
        raise BadFunction(f"returned {result!r:.200}; expected (observation, reward, done)")
    observation, reward, done, *further = result
    numbers = further[0] if further else {}
    if not isinstance(numbers, dict) or not all(isinstance(name, str) for name in numbers):
        raise BadFunction(f"returned {numbers!r:.200} behind done; expected a dictionary of numbers by name")
    if type(done).__name__ not in ("bool", "bool_"):  # numpy's, too
        raise BadFunction(f"returned done {done!r:.80}, a {type(done).__name__}; expected True or False")
    rewards = [_number(one) for one in reward] if isinstance(reward, list | tuple) else _number(reward)
    parts = {name[:MAX_NAME_CHARACTERS]: _number(number) for name, number in numbers.items()}
    return messages_of(observation), rewards, bool(done), parts


def _number(reward: Any) -> float:
    try:
        number = 0.0 if reward is None else float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or isinstance(reward, str):
        expected = "a finite number, None for 0, or a list of one for each token of the turn"
        raise BadFunction(f"returned the reward {reward!r:.80}; expected {expected}")
    return number
