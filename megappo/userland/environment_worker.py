"""The worker process: `python -m megappo.userland.environment_worker MEMORY_BYTES SECONDS SOURCE NAME [ARGUMENTS]`.

It hosts any number of environments at once, instances of the class NAME of SOURCE (FILE.py, or a module's name); with
ARGUMENTS, a JSON list, of what NAME makes of these. Its standard input is a socket. Over it go JSON objects, each with
its length before it as in `rewards.frames`: first what it has loaded, {"takes": ..., "tools": [...]} or
{"error": "..."}; then it answers requests {"call": i, "episode": j, "method": "...", "arguments": [...]}, in any order,
by {"call": i} and {"result": ...}, {"error": "..."}, or {"late": true} where SECONDS were too few. It imports the
standard library alone, so it starts at once; the user's file imports what it likes.
"""

import asyncio
import inspect
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from megappo.userland.forms import BadFunction, Takes
from megappo.userland.frames import read, write
from megappo.userland.user_code import attempt, limit_memory, load, own_connection, told

METHODS = ("reset", "step")
MAX_NAME_CHARACTERS = 64
STACK_BYTES = 2**20
"""Of a thread: its memory counts as this process', whatever it uses of it."""
Messages = list[dict[str, str]]


def main() -> None:
    limit, seconds, source, name, *arguments = sys.argv[1:]
    connection = own_connection()
    if limit:
        limit_memory(int(limit))
    threading.stack_size(STACK_BYTES)
    loaded, error = attempt(_load, source, name, *arguments)
    make, ready = (None, {"error": error}) if error else loaded
    asyncio.run(_serve(connection, make, ready, float(seconds)))
    sys.stdout.flush()
    os._exit(0)  # threads that hang would be waited for


async def _serve(connection: Any, make: Callable[[], Any] | None, ready: Mapping[str, Any], seconds: float) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    host = Host(make, seconds, writer)
    host.send(ready)
    try:
        while make is not None:
            host.take(json.loads(await read(reader)))
        await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):  # the owner went: so does the worker
        pass


def _load(source: str, name: str, *arguments: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """What makes environments, and what its owner is to know."""
    make = load(source, name)
    for one in arguments:
        make = make(*json.loads(one))
    missing = [method for method in METHODS if not callable(getattr(make, method, None))]
    if missing:
        raise BadFunction(f"has no {' and no '.join(missing)}: expected a class with reset(row) and step(message)")
    return make, {"takes": asdict(_takes(make)), "tools": _tools(make)}


def _takes(make: Callable[[], Any]) -> Takes:
    """What it needs of a record: the `columns` that it names; without any it gets all that there are."""
    columns = getattr(make, "columns", None)
    if columns is None:
        return Takes(raw_prompts=True, welcome=None)
    if not isinstance(columns, list | tuple) or not all(isinstance(name, str) for name in columns):
        raise BadFunction(f"has columns = {columns!r:.80}; expected a tuple of names")
    return Takes(tuple(columns), raw_prompts=True)


def _tools(make: Callable[[], Any]) -> list[dict[str, Any]]:
    """The functions that it offers the policy, each as a JSON schema."""
    tools = getattr(make, "tools", [])
    try:
        is_told = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools) and json.dumps(tools)
    except (TypeError, ValueError, RecursionError):
        is_told = False
    if not is_told:
        raise BadFunction(f"has tools = {tools!r:.200}; expected a list of JSON schemas")
    return tools


class Host:
    """The environments of this process.

    Args:
        seconds: that a call may take.
    """

    def __init__(self, make: Callable[[], Any], seconds: float, writer: asyncio.StreamWriter):
        self.make, self.seconds, self.writer = make, seconds, writer
        self.environments: dict[int, Any] = {}
        self._left: set[int] = set()
        self._tasks: set[asyncio.Task] = set()
        self._calls: dict[int, asyncio.Task] = {}

    def send(self, message: Mapping[str, Any]) -> None:
        """Tell the owner something."""
        write(self.writer, json.dumps(message).encode())

    def take(self, request: Mapping[str, Any]) -> None:
        """Begin with a request."""
        task = asyncio.get_running_loop().create_task(self._answer(**request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: int, episode: int, method: str, arguments: list) -> None:
        limit = asyncio.timeout(self.seconds)
        try:
            async with limit:
                reply = {"result": await self._result(episode, method, arguments)}
        except BadFunction as error:
            reply = {"error": str(error)}
        except BaseException as error:  # SystemExit too: user code must not end the worker without a word
            reply = {"late": True} if limit.expired() else {"error": f"{method} {told(error)}"}
        self.send({"call": call} | reply)

    async def _result(self, episode: int, method: str, arguments: list) -> Any:
        if method == "close":
            if episode not in self.environments:  # it is being made
                self._left.add(episode)
            elif (call := self._calls.get(episode)) is not None:  # nobody waits for it any more
                call.cancel()
                await asyncio.wait([call], timeout=self.seconds / 2)  # one that is not cancelled leaves time to close
            return await _closed(self.environments.pop(episode, None))
        if method == "reset":
            environment = await _in_thread(self.make)
            if episode in self._left:
                return await _closed(environment)
            self.environments[episode] = environment
            return messages_of(await self._called(episode, environment.reset, *arguments), "reset")
        return _step(await self._called(episode, self.environments[episode].step, *arguments))

    async def _called(self, episode: int, function: Callable[..., Any], *arguments: Any) -> Any:
        self._calls[episode] = asyncio.current_task()
        try:
            return await called(function, *arguments)
        finally:
            del self._calls[episode]


async def _closed(environment: Any) -> None:
    if hasattr(environment, "close"):
        await called(environment.close)


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in the end; a plain function has a thread of its own, which may never end."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    found = await _in_thread(function, *arguments)
    return await found if inspect.isawaitable(found) else found


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
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


def messages_of(observation: Any, method: str) -> Messages:
    """An observation as messages: None is none, a text one of the user's.

    Raises:
        BadFunction: it is something else.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        observation = {"role": "user", "content": observation}
    messages = [observation] if isinstance(observation, dict) else observation
    found = f"{method} returned the observation {observation!a:.200}"
    if not isinstance(messages, list | tuple) or not all(map(_is_message, messages)):
        raise BadFunction(f"{found}; expected a text, None, or messages {{'role': str, 'content': str}}")
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadFunction(f"{found}, which is no JSON: {error}") from error
    return list(messages)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _step(result: Any) -> tuple[Messages, float | list[float], bool, dict[str, float]]:
    if not isinstance(result, tuple | list) or len(result) not in (3, 4):
        raise BadFunction(f"step returned {result!r:.200}; expected (observation, reward, done)")
    observation, reward, done, *further = result
    if not all(isinstance(told, dict) and all(isinstance(name, str) for name in told) for told in further):
        raise BadFunction(f"step returned {further[0]!r:.200} behind done; expected a dictionary of numbers by name")
    if type(done).__name__ not in ("bool", "bool_"):  # numpy's, too
        raise BadFunction(f"step returned done {done!r:.80}, a {type(done).__name__}; expected True or False")
    rewards = [_number(one) for one in reward] if isinstance(reward, list | tuple) else _number(reward)
    told = {name[:MAX_NAME_CHARACTERS]: _number(number) for one in further for name, number in one.items()}
    return messages_of(observation, "step"), rewards, bool(done), told


def _number(reward: Any) -> float:
    try:
        number = 0.0 if reward is None else float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or isinstance(reward, str):
        expected = "a finite number, None for 0, or a list of one for each token of the turn"
        raise BadFunction(f"step returned the reward {reward!r:.80}; expected {expected}")
    return number


if __name__ == "__main__":
    main()
