"""Connections for many HTTP requests at a time, and the events of a streamed reply."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

EVENT = b"data: "
LAST_EVENT = b"data: [DONE]"


class Connections(contextlib.AsyncExitStack):
    """Connections to a server. Each is an `AsyncClient` of its own, because one with hundreds of connections inspects
    them all at each request (httpcore 1.0.9, _async/connection_pool.py:294), which costs more than the request.

    Args:
        options: options of each `AsyncClient`.
    """

    def __init__(self, options: Mapping[str, Any]):
        super().__init__()
        self._options = options
        self._free: list[httpx.AsyncClient] = []

    @contextlib.asynccontextmanager
    async def free(self) -> AsyncIterator[httpx.AsyncClient]:
        """Lend a connection that no request uses."""
        if self._free:
            http = self._free.pop()
        else:
            http = await self.enter_async_context(httpx.AsyncClient(**self._options))
        try:
            yield http
        finally:
            self._free.append(http)


async def events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events."""
    rest = bytearray()  # the beginning of a line, which may have megabytes
    async for part in response.aiter_bytes():  # aiter_lines would also end them within a text
        rest += part
        if b"\n" in part:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                if line.startswith(EVENT) and line != LAST_EVENT:
                    yield bytes(line.removeprefix(EVENT))
