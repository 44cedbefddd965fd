"""Tries a program on tests, each in a process of its own that can do little: `python -m megappo.rewards.trial`.

Reads from its input, as JSON, a `Job`. Writes lines of JSON: {"unprotected": why} alone, or {} and then what each test
gave: {"output": what the program wrote}, {"result": what its function returned, as JSON in a text}, {"passed": true} or
{"failed": why}. The expected outputs of the first two kinds of tests never come here: the program cannot find them.
Whatever a program has written is read by descriptors from before it began. The standard library alone.
"""

import atexit
import builtins
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import IO, Any, NamedTuple

from megappo.lifetime import die_with
from megappo.rewards.jail import confine, limit

MAX_OUTPUT_BYTES = 2**22
FILE_BYTES = 2**24
MAX_REASON = 300
STDIN, STDOUT, STDERR, RESULT = range(4)
"""Descriptors of a program."""
LIBRARIES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
PRELUDE = "\n".join([*(f"from {name} import *" for name in LIBRARIES), *(f"import {name}" for name in LIBRARIES)])
"""What programs may use without importing it, as LiveCodeBench and verl's prime_code have it."""
Outcome = dict[str, Any]


class Job(NamedTuple):
    """What is to be tried.

    Attributes:
        code: the program.
        tests: {"stdin": text}, {"function": name, "arguments": list} or {"test": code, "entry_point": name or null}.
        test_seconds: of each test; total_seconds: of all, those beyond fail.
        memory_bytes: of each.
        is_protected: False: without confinement, but for limits.
        folder: for what programs write.
    """

    code: str
    tests: list[dict[str, Any]]
    test_seconds: float
    total_seconds: float
    memory_bytes: int
    is_protected: bool
    folder: str


def main() -> None:
    job = Job(**json.load(sys.stdin))
    if job.is_protected and (reason := _why_unprotected()):
        return _say({"unprotected": reason})
    _say({})
    exec(PRELUDE, {})  # once, not in each process
    deadline = time.monotonic() + job.total_seconds
    for test in job.tests:
        _say(_outcome(job, test, deadline))


def _say(told: Outcome) -> None:
    print(json.dumps(told), flush=True)


def _why_unprotected() -> str:
    """ "" where processes can be confined."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            confine("/dev", memory_bytes=2**40, cpu_seconds=60, file_bytes=0)
            os.write(theirs, b"confined")
        except Exception as error:
            os.write(theirs, str(error).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    told = os.read(ours, 1000).decode()
    os.close(ours)
    _, status = os.waitpid(pid, 0)
    return "" if told == "confined" else told or f"it ended a process ({os.waitstatus_to_exitcode(status)})"


def _outcome(job: Job, test: dict[str, Any], deadline: float) -> Outcome:
    """Of one test, in a fresh folder."""
    seconds = min(job.test_seconds, deadline - time.monotonic())
    if seconds <= 0:
        return {"failed": f"no time was left of {job.total_seconds:g} seconds"}
    folder = tempfile.mkdtemp(dir=job.folder)
    files = [tempfile.TemporaryFile(dir=folder, buffering=0) for _ in range(RESULT + 1)]  # noqa: SIM115
    try:
        files[STDIN].write(test.get("stdin", "").encode(errors="replace"))
        files[STDIN].seek(0)
        token = os.urandom(16).hex()
        status = _run(lambda: _child(folder, files, job, test, token), seconds)
        if status is None:
            return {"failed": f"took longer than {seconds:.3g} seconds"}
        return _told(files, status, test, token)
    finally:
        for file in files:
            file.close()
        with suppress(RecursionError):  # of folders in folders: `code` removes these
            shutil.rmtree(folder, ignore_errors=True)


def _told(files: Sequence[IO[bytes]], status: int, test: dict[str, Any], token: str) -> Outcome:
    """What a program that has ended left behind."""
    if status != 0:
        why = _read(files[STDERR]).decode(errors="replace").strip().rpartition("\n")[2]
        return {"failed": why[-MAX_REASON:] or f"ended with {status}"}
    kind = STDOUT if "stdin" in test else RESULT
    found = _read(files[kind])
    if len(found) > MAX_OUTPUT_BYTES:
        return {"failed": f"wrote more than {MAX_OUTPUT_BYTES} bytes"}
    told = found.decode(errors="replace")
    if "stdin" in test:
        return {"output": told}
    if "function" in test:
        return {"result": told}
    return {"passed": True} if told == token else {"failed": "ended before the test did"}


def _run(child: Callable[[], None], seconds: float) -> int | None:
    """How a child ended; None: it took too long, and was killed."""
    owner = os.getpid()
    if (pid := os.fork()) == 0:
        try:
            die_with(owner)
            child()
        finally:
            os._exit(1)
    descriptor = os.pidfd_open(pid)
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    has_ended = waiting.poll(1000 * seconds)
    os.close(descriptor)
    if not has_ended:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if has_ended else None


def _child(folder: str, files: Sequence[IO[bytes]], job: Job, test: dict[str, Any], token: str) -> None:
    """Run the program, and end."""
    os.chdir(folder)
    for descriptor, file in enumerate(files):
        os.dup2(file.fileno(), descriptor)
    os.closerange(RESULT + 1, min(os.sysconf("SC_OPEN_MAX"), 2**16))
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    written = sys.stdout
    limits = {"memory_bytes": job.memory_bytes, "cpu_seconds": int(job.test_seconds) + 1, "file_bytes": FILE_BYTES}
    code, status = job.code, 1
    try:
        if job.is_protected:
            confine(folder, **limits)
        else:
            limit(**limits)
        del job, limits
        status = _ending(lambda: _execute(code, test, token))
        _finish()
        for file in {sys.stdout, written}:
            with suppress(ValueError):  # it has been closed
                file.flush()
    except BaseException as error:
        status = 1
        os.write(STDERR, f"{type(error).__name__}: {str(error)[:MAX_REASON]}".encode(errors="replace"))
    os._exit(status)


def _ending(program: Callable[[], None]) -> int:
    """The exit code that it asks for."""
    try:
        program()
    except SystemExit as ending:
        return 0 if ending.code in (None, 0) else 1
    return 0


def _execute(code: str, test: dict[str, Any], token: str) -> None:
    """The program, as a module, and then the test. The program has what a prelude gives as it has what Python does, and
    the test, whose names are the program's, the prelude's modules."""
    module = ModuleType("__main__" if "stdin" in test else "solution")
    sys.modules[module.__name__] = module
    names = vars(module)
    names["__file__"] = os.path.abspath("solution.py")
    names["__builtins__"] = _prelude()
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 100_000))
    exec(compile(code, "solution.py", "exec"), names)
    if "function" in test:
        owner = names["Solution"]() if isinstance(names.get("Solution"), type) else None
        function = getattr(owner, test["function"], None) or names[test["function"]]
        _write(json.dumps(function(*test["arguments"])))
    elif "test" in test:
        written = {name: one for name, one in names.items() if name != "__builtins__"}
        known = {name: sys.modules[name] for name in LIBRARIES} | written
        exec(compile(test["test"], "test.py", "exec"), known)
        if test["entry_point"]:
            known["check"](known[test["entry_point"]])
        _write(token)


def _prelude() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    return names | vars(builtins)


def _write(result: str) -> None:
    with open(RESULT, "w", closefd=False) as file:
        file.write(result)


def _finish() -> None:
    """What Python does at its end."""
    while waiting := [one for one in threading.enumerate() if one is not threading.current_thread() and not one.daemon]:
        waiting[0].join()
    atexit._run_exitfuncs()


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES + 1)


if __name__ == "__main__":
    main()
