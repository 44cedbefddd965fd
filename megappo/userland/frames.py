"""Messages over a socket, each with its length before it, and all of one to be moved before a deadline.

The standard library alone. Deadlines are times of time.monotonic().
"""

import math
import socket
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

LENGTH = struct.Struct("!Q")
CHUNK_BYTES = 2**20


class FrameError(ValueError):
    """What came is no message of the other side's."""


def send(connection: socket.socket, message: bytes, deadline: float = math.inf) -> None:
    """Send a message.

    Raises:
        TimeoutError: the other side did not take it in time.
        OSError: it has ended.
    """
    for part in (LENGTH.pack(len(message)), message):
        _limit(connection, deadline, "")
        connection.sendall(part)  # its timeout is for all of it


def write(writer: "StreamWriter", message: bytes) -> None:
    """As `send`, in an event loop, which sends it by and by."""
    writer.write(framed(message))


async def read(reader: "StreamReader") -> bytes:
    """As `receive`, in an event loop.

    Raises:
        IncompleteReadError: the other side has ended.
    """
    return await reader.readexactly(_checked(await reader.readexactly(LENGTH.size), math.inf))


def framed(message: bytes) -> bytes:
    """A message with its length before it."""
    return LENGTH.pack(len(message)) + message


def taken(received: bytearray, max_bytes: int) -> Iterator[bytes]:
    """The messages that are whole, removed from what has been received.

    Raises:
        FrameError: a message of more than max_bytes was announced.
    """
    while len(received) >= LENGTH.size:
        end = LENGTH.size + _checked(received[: LENGTH.size], max_bytes)
        if len(received) < end:
            return
        message = bytes(received[LENGTH.size : end])
        del received[:end]
        yield message


def receive(connection: socket.socket, max_bytes: int, deadline: float = math.inf) -> bytes:
    """The next message.

    Raises:
        TimeoutError: it did not come in time; says how much of it came, if any did.
        EOFError: the other side has closed the connection.
        OSError: it has ended.
        FrameError: a message of more than max_bytes was announced.
    """
    return _exactly(connection, _checked(_exactly(connection, LENGTH.size, deadline), max_bytes), deadline)


def _checked(announced: bytes | bytearray, max_bytes: float) -> int:
    """A message's length."""
    (size,) = LENGTH.unpack(announced)
    if size > max_bytes:
        raise FrameError(f"announced {size} bytes, expected at most {max_bytes}")
    return size


def _exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        progress = f"{len(found)} of {size} bytes came"
        _limit(connection, deadline, progress)
        try:
            part = connection.recv(min(size - len(found), CHUNK_BYTES))
        except TimeoutError as error:
            raise TimeoutError(progress) from error
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _limit(connection: socket.socket, deadline: float, progress: str) -> None:
    """Give the next operation the time that is left."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(progress)
    connection.settimeout(None if math.isinf(left) else left)
