"""Worker processes for user code, seen from their owner, which trusts nothing that they send."""

import asyncio
import itertools
import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megappo.errors import ActionableError
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.keeper import KILL_TIMEOUT_SECONDS, ask_to_end, signal_of
from megappo.runtime.machine import PYTHON, for_python, unbound
from megappo.userland.signatures import CallMode, InputSpec
from megappo.userland.user_code import JsonObject

MAX_BYTES = 2**26
"""Longest line that user code may have written."""

START_TIMEOUT_SECONDS = 120.0
"""Time that a worker may take to import user code."""
GRACE_SECONDS = 5.0
"""Time after a coroutine's limit in which the worker reports that it is over; a worker that does not is blocked."""
EXIT_SECONDS = 2.0
"""Time that a worker may take to exit once it or its owner has closed the connection."""
SECRETS = re.compile(
    r"((TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|KEY|CREDENTIAL|AUTH|JWT)S?|(^|_)(?!^PWD$)(PASS|PWD|PAT))(_|$)",
    re.IGNORECASE,
)
"""Found in the names of environment variables that hold secrets; TOKENIZERS_PARALLELISM, PATH and PWD do not match."""


class CallError(Exception):
    """A call of user code failed. The message follows the name of the code.

    Attributes:
        is_late: the call took longer than it may.
        has_raised: the code raised an error, and its worker can be called again.
        index: number of the row that is to blame; None: unknown.
    """

    def __init__(self, reason: str, *, is_late: bool = False, has_raised: bool = False, index: int | None = None):
        super().__init__(reason)
        self.is_late = is_late
        self.has_raised = has_raised
        self.index = index


class WorkerProcess:
    """A worker and its keeper, in a session of their own, so that Ctrl-C does not reach them. The keeper ends when the
    worker does, or the thread that has started it, and ends whatever user code has started by then.

    Attributes:
        is_up: it can be called.
    """

    def __init__(self, memory_limit_gib: float | None, pass_env: Collection[str]):
        self._connection, theirs = socket.socketpair()
        keeper = [*PYTHON, "-m", "megappo.runtime.keeper", str(os.getpid())]
        with theirs, unbound():
            self._process = subprocess.Popen(
                [*keeper, *PYTHON, "-m", "megappo.userland.worker"],
                stdin=theirs,
                env=worker_variables(os.environ, pass_env),
                start_new_session=True,
            )
        self._memory_bytes = None if memory_limit_gib is None else int(memory_limit_gib * 2**30)
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[JsonObject | None]] = {}
        self._fault = ""
        self.is_up = True

    async def load(self, arguments: JsonObject) -> Any:
        """Return the host's description of the code that it has loaded.

        Raises:
            CallError: it has not loaded it.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=MAX_BYTES)
        self._reading = asyncio.create_task(self._read(reader))
        arguments = {"memory_bytes": self._memory_bytes, **arguments}
        return await self.call("load", arguments, START_TIMEOUT_SECONDS)

    async def call(self, method: str, arguments: JsonObject, seconds: float) -> Any:
        """Return the result of a method of the host that is a coroutine.

        Raises:
            CallError: it failed.
        """
        return await self.result(self.begin(method, arguments, seconds), seconds, GRACE_SECONDS)

    def begin(self, method: str, arguments: JsonObject, seconds: float) -> asyncio.Future:
        """Send a call, whose reply `result` waits for. Calls of plain functions are run in their order."""
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        if self.is_up:
            request = {"call": number, "method": method, "arguments": arguments, "seconds": seconds}
            self._writer.write(json.dumps(request).encode() + b"\n")
        else:
            reply.set_result(None)
        return reply

    async def result(
        self,
        reply: asyncio.Future,
        seconds: float,
        grace_seconds: float = 0.0,
    ) -> Any:
        """Return the result of a call that was begun; stop the process if there is none in time.

        Raises:
            CallError: the call failed; the process may have ended.
        """
        try:
            async with asyncio.timeout(seconds + grace_seconds):
                answer = await reply
        except TimeoutError as error:
            self.stop()
            raise CallError(f"took longer than {seconds:g} seconds and was stopped", is_late=True) from error
        if answer is None:
            raise CallError(self._fault or f"ended its process ({await asyncio.to_thread(self._exit)})")
        if "error" in answer:
            raise CallError(str(answer["error"]), has_raised=True)
        if "late" in answer:
            raise CallError(f"took longer than {seconds:g} seconds", is_late=True)
        return answer.get("result")

    def stop(self) -> None:
        """End the process at once; calls in progress fail."""
        self._fault = self._fault or "was stopped"
        self._hang_up()
        ask_to_end(self._process)

    async def end(self, timeout_seconds: float = 0.0) -> None:
        """Close the connection and make sure that the process ends, with all that it has started.

        Args:
            timeout_seconds: how long it may take to exit by itself.
        """
        self._hang_up()
        await asyncio.to_thread(end_keeper, self._process, timeout_seconds)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (line := await reader.readline()).endswith(b"\n"):  # at the end of file it may return a part of one
                self._receive(line)
        except ConnectionError:
            pass
        except ValueError as error:  # the line is too long
            self._distrust(str(error))
        self._hang_up()

    def _receive(self, line: bytes) -> None:
        try:
            reply = json.loads(line)
            waiting = self._replies.pop(reply["call"])
        except (ValueError, RecursionError, TypeError, LookupError):
            return self._distrust(f"{line[:80]!r}")
        if not waiting.done():  # else nobody waits for it any more
            waiting.set_result(reply)
        return None

    def _distrust(self, received: str) -> None:
        remedy = "does it write to a descriptor that it has not opened?"
        self._fault = f"sent something other than its results to the trainer: {received}; {remedy}"
        self._hang_up()

    def _hang_up(self) -> None:
        self.is_up = False
        if self._writer is None:
            self._connection.close()
        else:
            self._writer.transport.abort()
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_result(None)

    def _exit(self) -> str:
        """Return how the process exited."""
        try:
            code = self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        found = signal_of(code)
        return f"killed by {found}" if found else f"exit code {code}"


def end_keeper(process: subprocess.Popen, timeout_seconds: float) -> None:
    """Wait for a keeper to end by itself, then end it with all that it keeps."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_seconds)
    ask_to_end(process)
    with suppress(subprocess.TimeoutExpired):
        process.wait(2 * KILL_TIMEOUT_SECONDS)
    process.kill()
    process.wait()


def worker_variables(variables: Mapping[str, str], pass_env: Collection[str]) -> dict[str, str]:
    """Return the environment variables of a worker: its owner's without secrets, unless pass_env names them. Scripts
    that it starts import their neighbours, as anywhere."""
    passed = {name: value for name, value in variables.items() if name in pass_env or not SECRETS.search(name)}
    passed.pop("PYTHONSAFEPATH", None)
    return for_python(passed)


@dataclass(frozen=True)
class Description:
    """The code that a worker has loaded.

    Attributes:
        modes: how each reward function is called.
    """

    inputs: InputSpec
    modes: list[CallMode] = field(default_factory=list)


_DESCRIPTION = TypeAdapter(Description)


class WorkerPool(AbstractContextManager):
    """Workers that have loaded the same code, and the thread whose event loop talks to them. The kernel ends them
    together with that thread, so that they never outlive the trainer.

    Args:
        spec: the code's name, for messages.
        host: what the workers host, see `worker`. arguments: the host's arguments.
        timeout_seconds: limit of a call.
        memory_limit_gib: memory that a process may take; None: any.
        pass_env: variables that the workers get although their names suggest secrets.
    Attributes:
        kind: what the code is, for messages.
        error: type of errors of the code.
        workers: the workers in use.
        description: description of the code.
        takes: the fields of a record that it gets.
    """

    kind: str
    error: type[ActionableError]

    def __init__(
        self,
        spec: str,
        host: str,
        arguments: JsonObject,
        *,
        num_workers: int,
        timeout_seconds: float,
        memory_limit_gib: float | None = None,
        pass_env: Collection[str] = (),
    ):
        self.spec = spec
        self.num_workers = num_workers
        self.timeout_seconds = timeout_seconds
        self.memory_limit_gib = memory_limit_gib
        self._pass_env = pass_env
        self._load = {"host": host, **arguments}
        self.workers: set[WorkerProcess] = set()
        self.is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=f"{host} workers", daemon=True)
        self._thread.start()
        try:
            self.run(self._start_all())
        except CallError as error:
            self.close()
            raise self.fault(str(error)) from error
        self.takes = self.description.inputs

    def fault(self, reason: str) -> ActionableError:
        """Return an error that names the code and the remedy."""
        return self.error(f"{self.kind} {self.spec} {reason}\nfix it, or choose another {self.kind}")

    def close(self) -> None:
        """End all workers and what they started. May be called again."""
        if self.is_closed:
            return
        self.is_closed = True
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def post(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the pool's thread. Do nothing if the pool is closed: its caller reports that."""
        if not self.is_closed:
            self._loop.call_soon_threadsafe(callback, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine, which has time limits of its own, in the pool's thread, and return its result."""
        with heartbeat.waiting():
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start_all(self) -> None:
        await asyncio.gather(*(self.start() for _ in range(self.num_workers)))

    async def start(self) -> WorkerProcess:
        """Start a worker.

        Raises:
            CallError: it has not loaded the code.
        """
        worker = WorkerProcess(self.memory_limit_gib, self._pass_env)
        self.workers.add(worker)
        try:
            self.description = _DESCRIPTION.validate_python(await worker.load(self._load))
        except BaseException as error:
            self.workers.discard(worker)
            await worker.end()
            if isinstance(error, ValidationError):
                raise CallError("answered with something other than its signature") from error
            raise
        return worker

    async def replace(self, worker: WorkerProcess) -> WorkerProcess:
        """Return a new worker in place of one that was lost.

        Raises:
            CallError: it has not loaded the code.
        """
        self.workers.discard(worker)
        await worker.end()
        return await self.start()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.end(EXIT_SECONDS) for worker in self.workers))
        await self._loop.shutdown_default_executor()
