"""The process that runs people's code: `python -m megappo.userland.worker`.

Its standard input is a socket with messages of `channel`. A request {"call": number, "method": name, "arguments":
{...}, "seconds": time limit of a coroutine} is answered by {"call": number} with "result", "error" (a text), or "late"
if the time limit was exceeded. The first method is "load", with the name of a host as argument; the others are those of
the host. Coroutines run in an event loop, any number at once. Plain calls run one after the other in the main
thread outside of that loop, so that people's code may run a loop of its own. It imports the standard library alone, so
it starts at once; people's files import what they like.
"""

import asyncio
import atexit
import inspect
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from megappo.userland.channel import Channel
from megappo.userland.environment_host import EnvironmentHost
from megappo.userland.reward_host import RewardHost
from megappo.userland.user_code import describe, limit_memory

HOSTS = {"rewards": RewardHost, "environments": EnvironmentHost}
MAX_REQUEST_BYTES = 2**62


class Worker:
    """Answers the requests of its owner."""

    def __init__(self) -> None:
        self._channel = Channel(self._begin, self._end, MAX_REQUEST_BYTES)
        self._host: RewardHost | EnvironmentHost | None = None
        self._tasks: set[asyncio.Task] = set()
        self._plain: deque[tuple[int, Callable[[], Any]]] = deque()
        self._wakes = asyncio.Event()
        self._is_ended = False
        self._pid = os.getpid()

    def run(self, connection: socket.socket) -> None:
        """Answer requests until the owner closes the connection."""
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(self._channel.connect(loop, connection))
        while not self._is_ended:
            loop.run_until_complete(self._wakes.wait())
            self._wakes.clear()
            while self._plain and not self._is_ended:
                number, work = self._plain.popleft()
                try:
                    reply = {"result": work()}
                except BaseException as error:  # SystemExit, too: the owner must get the reason
                    reply = {"error": describe(error)}
                self._reply(number, reply)

    def _begin(self, request: dict[str, Any]) -> None:
        number = request["call"]
        work = self._work(request["method"], request["arguments"])
        if not inspect.iscoroutine(work):
            self._plain.append((number, work))
            return self._wakes.set()
        task = asyncio.get_running_loop().create_task(self._answer(number, work, request["seconds"]))
        self._tasks.add(task)
        return task.add_done_callback(self._tasks.discard)

    def _work(self, method: str, arguments: dict[str, Any]) -> Any:
        """Return a coroutine, or a function to call in the main thread."""
        if method == "load":
            return partial(self._load, **arguments)
        return getattr(self._host, method)(**arguments)

    def _load(self, host: str, memory_bytes: int | None, **arguments: Any) -> Any:
        if memory_bytes is not None:
            limit_memory(memory_bytes)
        self._host = HOSTS[host](**arguments)
        return self._host.description

    async def _answer(self, number: int, work: Coroutine[Any, Any, Any], seconds: float) -> None:
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                reply = {"result": await work}
        except BaseException as error:
            reply = {"late": True} if limit.expired() else {"error": describe(error)}
        self._reply(number, reply)

    def _reply(self, number: int, reply: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # people's code has forked this child, which must not answer, too
            os._exit(0)
        self._channel.send({"call": number} | reply)

    def _end(self, reason: str) -> None:
        self._is_ended = True
        self._wakes.set()


def own_connection() -> socket.socket:
    """Return the standard input, a socket, on a descriptor that processes of people's code do not inherit; they find an
    empty input."""
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    return connection


def main() -> None:
    Worker().run(own_connection())
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)  # threads that hang would be waited for


if __name__ == "__main__":
    main()
