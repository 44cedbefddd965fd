"""A worker process of a reward function from its owner's side, who believes nothing of what it sends."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, get_args

from megappo.runtime.cores import unbound
from megappo.runtime.keeper import KILL_TIMEOUT_SECONDS, ask_to_end
from megappo.runtime.variables import PYTHON, for_python
from megappo.userland.forms import Graded, Rows, Takes, Way
from megappo.userland.frames import FrameError, receive, send
from megappo.userland.worker import (
    LARGEST_FLOAT32,
    MAX_ANSWER_CHARACTERS,
    MAX_NAME_CHARACTERS,
    MAX_PARTS,
    MAX_SCORES,
    is_part_name,
)

ENDING_SECONDS = 2.0
"""How long a worker that has closed its connection may take to end."""
MAX_ERROR_BYTES = 2**18
MAX_NUMBER_BYTES = 32
MAX_CHARACTER_BYTES = 12
"""JSON writes a character as six, if it is not ASCII, and one beyond 16 bits as twice as many."""
MAX_STEP_BYTES = 2 * MAX_NUMBER_BYTES
"""Of a response there are at most as many steps as characters."""
MAX_ROW_BYTES = (
    MAX_SCORES * MAX_NUMBER_BYTES
    + MAX_PARTS * (MAX_NUMBER_BYTES + MAX_CHARACTER_BYTES * MAX_NAME_CHARACTERS)
    + MAX_CHARACTER_BYTES * MAX_ANSWER_CHARACTERS
)


SECRETS = re.compile(
    r"((TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|KEY|CREDENTIAL|AUTH|JWT)S?|(^|_)(?!^PWD$)(PASS|PWD|PAT))(_|$)",
    re.IGNORECASE,
)
"""Found in the names of environment variables that hold secrets; TOKENIZERS_PARALLELISM, PATH and PWD do not."""


class WorkerError(Exception):
    """What went wrong with a worker, to follow the function's name. The worker is of no use any more."""


class Function(NamedTuple):
    """A reward function as its workers are told of it: see `worker`."""

    source: str
    name: str
    weight: float
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Failed:
    """Why there are no scores.

    Attributes:
        reason: follows the functions' names.
        is_late: a call took longer than it may.
    """

    reason: str
    is_late: bool


class Worker:
    """One process and its keeper, in a session of their own: Ctrl-C passes them by. The keeper ends with the thread
    that has made this, or when the worker does, and ends whatever user code has started by then.

    Args:
        memory_limit_gib, pass_env: as of `pool.load_reward`.
    """

    def __init__(self, functions: Sequence[Function], memory_limit_gib: float | None, pass_env: Collection[str]):
        self.process, self.connection = start("megappo.userland.worker", [], memory_limit_gib, pass_env)
        self._functions = functions

    def wait_ready(self, deadline: float) -> tuple[Takes, list[Way]]:
        """What the functions take together, and the way of each, once they are loaded."""
        self._say({"functions": self._functions}, deadline)
        return _ready(self._reply(0, deadline), len(self._functions))

    def call(self, function: int, rows: Rows, seconds: float) -> None:
        """Have it call a function, whose answers are to be asked for.

        Args:
            seconds: that it may take to read this, and that an async call may take.
        """
        self._check_silent()
        try:
            self._say({"function": function, "rows": vars(rows), "seconds": seconds}, time.monotonic() + seconds)
        except TimeoutError as error:
            raise TimeoutError("it did not read its rows") from error

    def answer(self, responses: Sequence[str], deadline: float) -> list[Graded] | Failed:
        """What it finds of the next rows, with these responses; all numbers are finite. The worker is ready for more,
        but after an exception."""
        count = len(responses)
        reply = self._reply(count * MAX_ROW_BYTES + sum(map(len, responses)) * MAX_STEP_BYTES, deadline)
        if "error" in reply:
            return Failed(str(reply["error"]), reply.get("late") is True)
        graded = reply.get("graded")
        if not isinstance(graded, list) or len(graded) != count or not all(map(_is_graded, graded, responses)):
            raise WorkerError(f"answered with something else than scores of {count} responses")
        return [Graded(*one) for one in graded]

    def _say(self, message: Mapping[str, Any], deadline: float) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: its reply says so
            send(self.connection, json.dumps(message).encode(), deadline)

    def _reply(self, most_bytes: int, deadline: float) -> dict[str, Any]:
        """The next answer, of so many bytes, or an error. It is read as what user code may have written."""
        try:
            return _parsed(receive(self.connection, MAX_ERROR_BYTES + most_bytes, deadline))
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise WorkerError(f"ended its process ({self._ending()})") from error
        except FrameError as error:
            raise _not_scores(str(error)) from error

    def _check_silent(self) -> None:
        """See that it has not sent more than it was asked for, which would be taken for the next answer."""
        self.connection.setblocking(False)
        with suppress(OSError):  # nothing, or it has ended, which its reply will say
            if early := self.connection.recv(80, socket.MSG_PEEK):
                raise _not_scores(f"{early!r} between two calls")

    def _ending(self) -> str:
        try:
            code = self.process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        with suppress(ValueError):  # not a signal: the function's own exit code
            return f"killed by {signal.Signals(code - 128).name}"
        return f"exit code {code}"

    def hang_up(self) -> None:
        """Tell it, and who may wait for it here, that nothing more will be said."""
        with suppress(OSError):  # it has ended
            self.connection.shutdown(socket.SHUT_RDWR)

    def end(self, timeout_seconds: float) -> None:
        """Let it end by itself, then have it ended, with all that it has started."""
        end(self.process, timeout_seconds)
        self.connection.close()


def start(
    module: str, words: Sequence[str], memory_limit_gib: float | None, pass_env: Collection[str]
) -> tuple[subprocess.Popen, socket.socket]:
    """Start a worker, a module of megappo, under a keeper: the keeper, and this end of the worker's connection.

    Args:
        words: the module's arguments, behind the bytes of memory that it may take.
    """
    ours, theirs = socket.socketpair()
    keeper = [*PYTHON, "-m", "megappo.runtime.keeper", str(os.getpid())]
    limit = "" if memory_limit_gib is None else str(int(memory_limit_gib * 2**30))
    with theirs, unbound():
        process = subprocess.Popen(
            [*keeper, *PYTHON, "-m", module, limit, *words],
            stdin=theirs,
            env=environment(os.environ, pass_env),
            start_new_session=True,
        )
    return process, ours


def end(process: subprocess.Popen, timeout_seconds: float) -> None:
    """Let a keeper end by itself, then have it end with all that it keeps."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_seconds)
    ask_to_end(process)
    with suppress(subprocess.TimeoutExpired):
        process.wait(2 * KILL_TIMEOUT_SECONDS)
    process.kill()
    process.wait()


def environment(variables: Mapping[str, str], pass_env: Collection[str]) -> dict[str, str]:
    """What a worker gets of its owner's variables: not the secrets, but for those that are named. Scripts that it
    starts find their neighbours, as anywhere."""
    passed = {name: value for name, value in variables.items() if name in pass_env or not SECRETS.search(name)}
    passed.pop("PYTHONSAFEPATH", None)
    return for_python(passed)


def _not_scores(found: str) -> WorkerError:
    remedy = "does it write to a descriptor that it has not opened?"
    return WorkerError(f"sent something else than scores to the trainer: {found}; {remedy}")


def _parsed(message: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{message[:80]!r} is not JSON") from error
    if not isinstance(reply, dict):
        raise FrameError(f"{message[:80]!r} is no JSON object")
    return reply


def _ready(reply: Mapping[str, Any], num_functions: int) -> tuple[Takes, list[Way]]:
    if "error" in reply:
        raise WorkerError(str(reply["error"]))
    match reply:
        case {
            "takes": {"needed": list(needed), "welcome": list() | None as welcome, "raw_prompts": bool(raw_prompts)},
            "ways": list(ways),
        }:
            known = len(ways) == num_functions and all(way in get_args(Way) for way in ways)
            if known and all(isinstance(name, str) for name in (*needed, *(welcome or ()))):
                return Takes(tuple(needed), None if welcome is None else tuple(welcome), raw_prompts), ways
    raise WorkerError("answered with something else than what it takes")


def _is_graded(value: object, response: str) -> bool:
    match value:
        case [[_, *_] as scores, dict(parts), str() | None as answer, False, weight, [] | [list()] as steps]:
            is_short = len(scores) <= MAX_SCORES and len(parts) <= MAX_PARTS and all(map(is_part_name, parts))
            is_finite = all(map(_is_number, (*scores, *parts.values())))
            is_weight = weight is None or (_is_number(weight) and weight >= 0)
            return is_short and is_finite and is_weight and _is_answer(answer or "") and _are_steps(steps, response)
    return False


def _is_number(value: object) -> bool:
    return isinstance(value, float) and abs(value) <= LARGEST_FLOAT32


def _are_steps(steps: Sequence[Sequence[Any]], response: str) -> bool:
    last = 0
    for step in chain.from_iterable(steps):
        match step:
            case [int(end), score] if last < end <= len(response) and _is_number(score):
                last = end
            case _:
                return False
    return True


def _is_answer(text: str) -> bool:
    """Whether it may be written to a file."""
    return len(text) <= MAX_ANSWER_CHARACTERS and text == text.encode(errors="replace").decode()
