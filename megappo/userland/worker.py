"""The process that runs user code: `python -m megappo.userland.worker`.

Its standard input is a socket; each message is a line of JSON. A request {"call": number, "method": name, "arguments":
{...}, "seconds": time limit of a coroutine} is answered by {"call": number} with "result", "error" (a text), or "late"
if the time limit was exceeded. The first method is "load", with the name of a host as argument; the others are methods
of the host. Coroutines run in an event loop, any number at once. Plain calls run one after the other in the main thread
outside of that loop, so that user code may run a loop of its own. It imports the standard library alone, so it starts
at once; the host of agents adds a server, and user files import what they like.
"""

import asyncio
import atexit
import inspect
import json
import logging
import os
import pkgutil
import socket
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from megappo.userland.model_text import as_json
from megappo.userland.user_code import BadFunction, JsonObject, describe, limit_memory

HOSTS = {
    "agents": "megappo.agents.agent_host:AgentHost",
    "environments": "megappo.userland.environment_host:EnvironmentHost",
    "rewards": "megappo.userland.signatures:RewardHost",
}
"""Imported when they are loaded: the host of agents imports a server."""
MAX_REQUEST_BYTES = 2**62


class Worker:
    """Answers the requests of its owner."""

    def __init__(self) -> None:
        self._host: Any = None
        self._tasks: set[asyncio.Task] = set()
        self._plain: asyncio.Queue[tuple[int, Callable[[], Any]] | None] = asyncio.Queue()
        self._pid = os.getpid()

    def run(self, connection: socket.socket) -> None:
        """Answer requests until the owner closes the connection."""
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        opening = asyncio.open_connection(sock=connection, limit=MAX_REQUEST_BYTES)
        reader, self._writer = self._loop.run_until_complete(opening)
        reading = self._loop.create_task(self._read(reader))
        while call := self._loop.run_until_complete(self._plain.get()):
            number, work = call
            try:
                result = work()
                if inspect.isawaitable(result):
                    result = self._loop.run_until_complete(result)
                self._reply(number, "result", result)
            except BaseException as error:  # SystemExit, too: the owner must get the reason
                self._reply(number, "error", describe(error))
        reading.cancel()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            request = json.loads(line)
            work = self._work(request["method"], request["arguments"])
            if inspect.iscoroutine(work):
                task = self._loop.create_task(self._answer(request["call"], work, request["seconds"]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._plain.put_nowait((request["call"], work))
        self._plain.put_nowait(None)

    def _work(self, method: str, arguments: JsonObject) -> Any:
        """Return a coroutine, or a function to call in the main thread."""
        if method == "load":
            return partial(self._load, **arguments)
        return getattr(self._host, method)(**arguments)

    def _load(self, host: str, memory_bytes: int | None, **arguments: Any) -> Any:
        if memory_bytes is not None:
            limit_memory(memory_bytes)
        self._host = pkgutil.resolve_name(HOSTS[host])(**arguments)
        return self._host.description

    async def _answer(
        self,
        number: int,
        work: Coroutine[Any, Any, Any],
        seconds: float,
    ) -> None:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                result = await work
            self._reply(number, "result", result)
        except BaseException as error:
            if limit.expired():
                self._reply(number, "late", True)
            else:
                self._reply(number, "error", describe(error))

    def _reply(self, number: int, kind: str, value: Any) -> None:
        if os.getpid() != self._pid:  # user code has forked this child, which must not answer, too
            os._exit(0)
        try:
            line = json.dumps({"call": number, kind: value}, default=as_json)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadFunction(f"returned something that is no JSON: {error}") from error
        self._writer.write(line.encode() + b"\n")


def own_connection() -> socket.socket:
    """Return the standard input, a socket, on a descriptor that processes of user code do not inherit; they find an
    empty input."""
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    return connection


def main() -> None:
    source = "user code, %(name)s: %(message)s"  # of what libraries print; user code may configure its own
    logging.lastResort.setFormatter(logging.Formatter(source))
    Worker().run(own_connection())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)  # threads that hang would be waited for


if __name__ == "__main__":
    main()
