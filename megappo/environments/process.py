"""A worker process of environments from its owner's side, who believes nothing of what it sends."""

import asyncio
import itertools
import json
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from megappo.observe.life import LIFE
from megappo.rewards.frames import FrameError, read, receive, write
from megappo.rewards.process import end, start

MAX_REPLY_BYTES = 2**26
GRACE_SECONDS = 5.0
"""Beyond the time limit of a call, for the worker to say that it is over: one that does not is blocked."""
OWED_SECONDS = 0.01
"""Between two looks whether answers are still owed."""


class EnvironmentFault(RuntimeError):
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
            "megappo.environments.worker", [str(seconds), *words], memory_limit_gib, pass_env
        )
        self.is_up = True
        self._numbers = itertools.count()
        self._pending: dict[int, asyncio.Future] = {}
        self._num_owed = 0
        self._reading: asyncio.Task | None = None

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

    async def attach(self) -> None:
        """Have it answer in the running event loop, until `detach`."""
        self.connection.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=self.connection.dup())
        self._reading = asyncio.create_task(self._read(reader))

    async def detach(self) -> None:
        """Leave the event loop, if it is in one. A worker that goes on to owe answers, of which a part may be lost now,
        is stopped."""
        if self._reading is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                while self._num_owed and self.is_up:
                    await asyncio.sleep(OWED_SECONDS)
        self._reading.cancel()
        self._reading = None
        if self._num_owed:
            self.stop()
        self._writer.close()

    async def ask(self, episode: int, method: str, *arguments: Any) -> Any:
        """What a method of an environment returns.

        Raises:
            EpisodeLost: it takes too long, or the process ended.
            EnvironmentFault: it raised, or returned something of the wrong type.
        """
        call = next(self._numbers)
        answer = self._pending[call] = asyncio.get_running_loop().create_future()
        try:
            self._send({"call": call, "episode": episode, "method": method, "arguments": arguments})
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
        with suppress(EpisodeLost, RuntimeError):  # the process, or the event loop, has ended
            self._send({"call": next(self._numbers), "episode": episode, "method": "close", "arguments": ()})

    def _send(self, message: dict[str, Any]) -> None:
        if not self.is_up:
            raise EpisodeLost("its process ended")
        self._num_owed += 1
        write(self._writer, json.dumps(message).encode())

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand out the answers until the process ends."""
        with suppress(asyncio.IncompleteReadError, OSError, FrameError, ValueError, LookupError, TypeError):
            while True:
                reply = json.loads(await read(reader, MAX_REPLY_BYTES))
                self._num_owed -= 1
                answer = self._pending.get(reply["call"])
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        self.stop()

    def stop(self) -> None:
        """Have it end at once; its episodes are lost."""
        self.is_up = False
        self.process.terminate()
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(EpisodeLost("its process ended"))

    def end(self, timeout_seconds: float) -> None:
        """See that it has ended, with all that it has started."""
        self.connection.close()
        end(self.process, timeout_seconds)
