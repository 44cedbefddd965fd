"""JSON messages over a socket, each behind its length in bytes.

Uses the standard library alone, without asyncio: a process that tries a program would take twice as long to start.
"""

import json
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, BaseTransport, Protocol, Transport
else:
    Protocol = object

LENGTH = struct.Struct("!Q")
MAX_BYTES = 2**26
"""Largest message that user code may have written."""


def framed(message: Any) -> bytes:
    """Return a message as it is sent."""
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def send(connection: socket.socket, message: Any) -> None:
    """Send a message over a blocking socket."""
    connection.sendall(framed(message))


def receive(connection: socket.socket, max_bytes: int) -> Any:
    """Return the next message of a blocking socket.

    Raises:
        EOFError: the other side has closed the connection.
        ValueError: it sent something else than a message of at most max_bytes.
    """
    (size,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    if size > max_bytes:
        raise ValueError(f"announced {size} bytes, expected at most {max_bytes}")
    return json.loads(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data


class Channel(Protocol):
    """One end of a connection, in an event loop.

    Args:
        on_message: called with each message, a JSON object.
        on_end: called with the reason why no more messages will come; "" if the other side closed the connection.
        max_bytes: of a message.
    """

    def __init__(self, on_message: Callable[[dict[str, Any]], None], on_end: Callable[[str], None], max_bytes: int):
        self._on_message, self._on_end, self._max_bytes = on_message, on_end, max_bytes
        self._received = bytearray()
        self._transport: Transport | None = None
        self._is_closed = False

    async def connect(self, loop: "AbstractEventLoop", connection: socket.socket) -> None:
        """Use a connected socket, which is closed at the end, in the running event loop."""
        await loop.create_connection(lambda: self, sock=connection)

    def send(self, message: Any) -> None:
        """Send a message; the event loop sends what the socket does not take at once."""
        assert self._transport is not None
        self._transport.write(framed(message))

    def close(self) -> None:
        """Close the connection at once, also one that is not established yet."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def progress(self) -> str:
        """The part of a message that is on its way, for an error message; "" if there is none."""
        if self._transport is None or self._transport.get_write_buffer_size():
            return "it did not read its input"
        if not self._received:
            return ""
        if len(self._received) < LENGTH.size:
            return f"{len(self._received)} of {LENGTH.size} bytes came"
        return f"{len(self._received) - LENGTH.size} of {self._announced()} bytes came"

    def connection_made(self, transport: "BaseTransport") -> None:
        self._transport = cast("Transport", transport)
        if self._is_closed:
            self.close()

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= LENGTH.size:
            size = self._announced()
            if size > self._max_bytes:
                return self._fail(f"announced {size} bytes, expected at most {self._max_bytes}")
            end = LENGTH.size + size
            if len(self._received) < end:
                return None
            data = bytes(self._received[LENGTH.size : end])
            del self._received[:end]
            try:
                message = json.loads(data)
            except (ValueError, RecursionError):
                return self._fail(f"{data[:80]!r} is not JSON")
            if not isinstance(message, dict):
                return self._fail(f"{data[:80]!r} is no JSON object")
            self._on_message(message)
        return None

    def eof_received(self) -> None:
        pass

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end("")

    def _announced(self) -> int:
        (size,) = LENGTH.unpack(self._received[: LENGTH.size])
        return size

    def _fail(self, reason: str) -> None:
        self.close()
        self._on_end(reason)
