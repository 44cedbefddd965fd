"""Scoring responses by a reward function in worker processes: user code can neither hang nor crash the trainer."""

import ast
import json
import os
import signal
import socket
import subprocess
import symtable
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from megappo.rewards.builtin import BUILTIN

START_TIMEOUT_SECONDS = 60.0
"""How long a worker may take to import the user's file."""
CLOSE_TIMEOUT_SECONDS = 2.0
"""How long an idle worker may take to end by itself."""


class RewardError(RuntimeError):
    """The reward function failed; the message names it and says what to do. The workers are gone."""


def parse_spec(spec: str) -> tuple[str, str]:
    """reward.function as (absolute file, function name); the file is "" for a built-in. Runs no user code.

    Raises:
        ValueError: neither a built-in nor FILE.py:FUNCTION, or no such file.
    """
    if spec in BUILTIN:
        return "", spec
    file, separator, name = spec.rpartition(":")
    if not separator or not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"reward.function {spec!r}: expected {', '.join(BUILTIN)} or FILE.py:FUNCTION")
    if not Path(file).is_file():
        raise ValueError(f"reward.function {spec!r}: no file {file} (looked in {Path.cwd()}): correct the path")
    return str(Path(file).resolve()), name


def missing_function(spec: str) -> str:
    """Why the file that `spec` names cannot define its function, as far as reading it tells; "" if it may.

    Raises:
        ValueError: as `parse_spec`.
    """
    file, name = parse_spec(spec)
    if not file:
        return ""
    try:
        tree = ast.parse(Path(file).read_bytes(), file)
        table = symtable.symtable(Path(file).read_text(), file, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        return f"reward.function {spec!r}: {file} is not Python: {error}"
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    brings_any = any(alias.name == "*" for node in imports for alias in node.names)
    if brings_any or name in names:
        return ""
    return f"reward.function {spec!r}: {file} defines no {name}, only {', '.join(sorted(names)) or 'nothing'}"


def load_reward(spec: str, *, num_workers: int, timeout_seconds: float) -> "RewardPool":
    """Start the workers of a reward function and wait until each has loaded it.

    Args:
        spec: a built-in's name, or FILE.py:FUNCTION of (prompts: list[str], responses: list[str], labels: list) -> one
            finite number per response.
        num_workers: processes, each called with an equal share of the rows.
        timeout_seconds: how long one call may take.

    Raises:
        ValueError: the spec is malformed or names no file.
        RewardError: the file cannot be imported or has no such function.
    """
    file, name = parse_spec(spec)
    return RewardPool(spec, [_Worker(file, name) for _ in range(num_workers)], timeout_seconds)


class _Worker:
    """One process, in a session of its own: Ctrl-C passes it by, and its whole group can be ended with it."""

    def __init__(self, file: str, name: str):
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "megappo.rewards.worker", str(theirs.fileno()), str(os.getpid()), file, name]
        package_parent = str(Path(__file__).resolve().parents[2])
        search_path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": search_path},
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    def reply(self) -> dict[str, Any]:
        """The worker's next answer; {"error": ...} when it died."""
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return {"error": f"ended its process ({self._ending()})"}

    def _ending(self) -> str:
        try:
            code = self.process.wait(CLOSE_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self, timeout_seconds: float) -> None:
        """Let it end by itself, then end what is left of its group."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_seconds)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class RewardPool:
    """A reward function spread over worker processes; made by `load_reward`, usable as a context manager.

    Keep it in the thread that made it: the kernel ends the workers together with that thread, so they never outlive the
    trainer, however it ends. After any error the workers are ended and the pool is closed.
    """

    def __init__(self, spec: str, workers: list[_Worker], timeout_seconds: float):
        self.spec = spec
        self.timeout_seconds = timeout_seconds
        self._workers = workers
        self._collect(workers, START_TIMEOUT_SECONDS, "load")

    def score(self, prompts: Sequence[str], responses: Sequence[str], labels: Sequence[Any]) -> list[float]:
        """One finite score per response, in order.

        Raises:
            RewardError: the function raised, hung, died, or did not return one finite number per response.
        """
        if not len(prompts) == len(responses) == len(labels):
            raise ValueError(f"{len(prompts)} prompts, {len(responses)} responses, {len(labels)} labels: not as many")
        if not self._workers:
            raise RewardError(f"reward function {self.spec} is closed")
        count = min(len(self._workers), len(responses))
        bounds = [len(responses) * i // count for i in range(count + 1)] if count else []
        busy = self._workers[:count]
        for worker, start, stop in zip(busy, bounds, bounds[1:], strict=False):
            part = slice(start, stop)
            with suppress(BrokenPipeError, ConnectionResetError):  # it died: its reply says so
                worker.connection.send((list(prompts[part]), list(responses[part]), list(labels[part])))
        replies = self._collect(busy, self.timeout_seconds, "score its responses")
        return [score for reply in replies for score in reply["scores"]]

    def _collect(self, workers: list[_Worker], timeout_seconds: float, task: str) -> list[dict[str, Any]]:
        """One reply of each worker, in their order; the first error ends the pool."""
        deadline = time.monotonic() + timeout_seconds
        replies: dict[_Worker, dict[str, Any]] = {}
        while len(replies) < len(workers):
            waiting = [worker for worker in workers if worker not in replies]
            ready = wait([worker.connection for worker in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"took longer than {timeout_seconds:g} seconds to {task} and was stopped")
            for worker in (worker for worker in waiting if worker.connection in ready):
                replies[worker] = worker.reply()
                if "error" in replies[worker]:
                    self._fail(replies[worker]["error"])
        return [replies[worker] for worker in workers]

    def _fail(self, reason: str) -> None:
        self._close(0.0)
        remedy = "fix it, choose another reward.function, or (if it was slow) raise reward.timeout_seconds"
        raise RewardError(f"reward function {self.spec} {reason}\n{remedy}")

    def close(self) -> None:
        """End all workers and what they started. May be called again."""
        self._close(CLOSE_TIMEOUT_SECONDS)

    def _close(self, timeout_seconds: float) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close(timeout_seconds)

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
