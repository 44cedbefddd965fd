"""A worker process of environments from its owner's side, who believes nothing of what it sends."""

import asyncio
import itertools
import json
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from megappo.errors import ActionableError
from megappo.runtime.heartbeat import LIFE
from megappo.runtime.keeper import ask_to_end
from megappo.userland.frames import CHUNK_BYTES, FrameError, framed, receive, taken
from megappo.userland.process import end, start

MAX_REPLY_BYTES = 2**26
GRACE_SECONDS = 5.0
"""Beyond the time limit of a call, for the worker to say that it is over: one that does not is blocked."""


class EnvironmentFault(ActionableError, RuntimeError):
    """What is wrong with an environment's code; the run ends."""


class EpisodeLost(Exception):
    """An environment took too long, or its process ended: its episode cannot go on, the others do."""


class Worker:
    """One process and its keeper; hosts environments.

    Args:
        words: of the command, behind the memory limit.
        seconds: that a call may take.
    Attributes:
        num_episodes: that it hosts.
    """

    def __init__(self, words: Sequence[str], seconds: float, memory_limit_gib: float | None, pass_env: Collection[str]):
        self.seconds = seconds
        self.num_episodes = 0
        self.process, self.connection = start(
            "megappo.userland.environment_worker", [str(seconds), *words], memory_limit_gib, pass_env
        )
        self.is_up = True
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future] = {}
        self._owed: dict[int, float] = {}  # calls, also those that nobody waits for, and when it is blocked without
        self._loop: asyncio.AbstractEventLoop | None = None
        self._received, self._unsent = bytearray(), bytearray()  # kept from one event loop to the next

    def wait_ready(self, seconds: float) -> dict[str, Any]:
        """What it has loaded, in so many seconds.

        Raises:
            EnvironmentFault: why it has not.
        """
        try:
            reply = json.loads(receive(self.connection, MAX_REPLY_BYTES, time.monotonic() + seconds))
        except TimeoutError as error:
            raise EnvironmentFault("took too long to load") from error
        except (EOFError, OSError, FrameError, ValueError) as error:
            raise EnvironmentFault("ended its process, or wrote to its connection, while it was loaded") from error
        if "error" in reply:
            raise EnvironmentFault(reply["error"])
        return reply

    def attach(self) -> None:
        """Have it answer in the running event loop, until `detach`. One that has been blocked meanwhile is stopped."""
        self.connection.setblocking(False)
        if self.owes() and min(self._owed.values()) < time.monotonic():
            self.stop()
        if self.is_up:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self.connection, self._receive)
            self._flush()

    def detach(self) -> None:
        """Leave the event loop, if it is in one; what the worker is at goes on."""
        if self._loop is not None:
            self._loop.remove_reader(self.connection)
            self._loop.remove_writer(self.connection)
            self._loop = None

    def owes(self) -> bool:
        """Whether there are calls that it has not answered, such as of `leave`."""
        if self.is_up and self._owed:
            self._flush()
            self._receive()
        return self.is_up and bool(self._owed)

    async def ask(self, episode: int, method: str, *arguments: Any) -> Any:
        """What a method of an environment returns.

        Raises:
            EpisodeLost: it takes too long, or the process ended.
            EnvironmentFault: it raised, or returned something of the wrong type.
        """
        call = next(self._numbers)
        answer = self._pending[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(call, episode, method, arguments)
            async with asyncio.timeout(self.seconds + GRACE_SECONDS):
                with LIFE.waiting():
                    reply = await answer
        except TimeoutError as error:
            self.stop()
            raise EpisodeLost(f"{method} blocked its process for more than {self.seconds:g} s") from error
        finally:
            del self._pending[call]
        if "late" in reply:
            raise EpisodeLost(f"{method} took longer than {self.seconds:g} s")
        if "error" in reply:
            raise EnvironmentFault(str(reply["error"]))
        return reply.get("result")

    def leave(self, episode: int) -> None:
        """Have an environment closed, without waiting for it."""
        with suppress(EpisodeLost):  # and it is gone
            self._send(next(self._numbers), episode, "close", ())

    def _send(self, call: int, episode: int, method: str, arguments: Sequence[Any]) -> None:
        if not self.is_up:
            raise EpisodeLost("its process ended")
        message = {"call": call, "episode": episode, "method": method, "arguments": arguments}
        self._unsent += framed(json.dumps(message).encode())
        self._owed[call] = time.monotonic() + self.seconds + GRACE_SECONDS
        self._flush()

    def _flush(self) -> None:
        """Send what the connection takes now, and the rest when it takes more."""
        try:
            del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.stop()
        if self._loop is not None:
            if self._unsent:
                self._loop.add_writer(self.connection, self._flush)
            else:
                self._loop.remove_writer(self.connection)

    def _receive(self) -> None:
        """Hand out the answers that have come; to those of which nobody waits, nothing."""
        try:
            part = self.connection.recv(CHUNK_BYTES)
            self._received += part
            for message in taken(self._received, MAX_REPLY_BYTES):
                reply = json.loads(message)
                del self._owed[reply["call"]]
                answer = self._pending.get(reply["call"])
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        except BlockingIOError:
            return
        except (OSError, ValueError, LookupError, TypeError, RecursionError):  # no answers
            part = b""
        if not part:
            self.stop()

    def stop(self) -> None:
        """Have it end at once; its episodes are lost."""
        self.detach()
        self.is_up = False
        ask_to_end(self.process)
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(EpisodeLost("its process ended"))

    def end(self, timeout_seconds: float) -> None:
        """See that it has ended, with all that it has started."""
        self.connection.close()
        end(self.process, timeout_seconds)
