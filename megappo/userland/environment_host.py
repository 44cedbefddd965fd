"""The environments of a worker process. Uses the standard library alone."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from megappo.userland.signatures import InputSpec
from megappo.userland.user_code import BadFunction, JsonObject, load, named

METHODS = ("reset", "step")
STACK_BYTES = 2**20
"""Stack of a thread: all of it counts as memory of the process."""
THREADS = ThreadPoolExecutor(max_workers=10_000, thread_name_prefix="environment-call")


class EnvironmentHost:
    """Any number of environments, each with its number.

    Args:
        source: FILE.py, or a module's name.
        name: name of a class, or with arguments of a function that returns one.
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
        self.description = {"inputs": asdict(_inputs(self._make))}
        self._seconds = seconds
        self._environments: dict[int, asyncio.Future] = {}
        self._calls: dict[int, asyncio.Task | None] = {}

    async def reset(self, number: int, row: JsonObject) -> Any:
        """Make an environment and begin its episode."""
        self._environments[number] = in_thread(self._make)
        return await self._call(number, "reset", row)

    async def step(self, number: int, message: JsonObject) -> Any:
        """Return what the environment's step returns."""
        return await self._call(number, "step", message)

    async def close(self, number: int) -> None:
        """Close an environment, also one that is still being made. Its call in progress, which nobody waits for any
        more, is cancelled."""
        made = self._environments.pop(number)
        call = self._calls.pop(number)
        await cancel(call, self._seconds)
        environment = await made
        if hasattr(environment, "close"):
            await called(environment.close)

    async def _call(self, number: int, method: str, argument: Any) -> Any:
        self._calls[number] = asyncio.current_task()
        environment = await asyncio.shield(self._environments[number])
        return await called(getattr(environment, method), argument)


def _inputs(make: Callable[[], Any]) -> InputSpec:
    """Return the `columns` that a class names, all that there are if it names none, and its `tools`."""
    columns = getattr(make, "columns", None)
    tools = tuple(getattr(make, "tools", ()))
    if columns is None:
        return InputSpec(optional=None, raw_prompts=True, tools=tools)
    if isinstance(columns, str):
        raise BadFunction(f"has columns = {columns!r:.80}; expected a tuple of names")
    needed = tuple(columns)
    return InputSpec(needed, raw_prompts=True, by_environment=needed, tools=tools)


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in the end. A plain function has a thread of its own, which may never end."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    result = await in_thread(function, *arguments)
    return await result if inspect.isawaitable(result) else result


async def cancel(task: asyncio.Task, seconds: float) -> None:
    """Cancel a task and wait for its end; one that continues leaves half of the time for more."""
    task.cancel()
    await asyncio.wait([task], timeout=seconds / 2)


def in_thread(function: Callable[..., Any], *arguments: Any) -> asyncio.Future:
    """Call a plain function in a thread; `asyncio.to_thread` has too few threads if some calls hang."""
    return asyncio.get_running_loop().run_in_executor(THREADS, _result, function, arguments)


def _result(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    try:
        return function(*arguments)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise RuntimeError(named(error)) from None  # no future raises StopIteration; SystemExit would end the loop
