"""Tries a program on tests, each in a confined process of its own: `python -m megappo.userland.graders.trial`.

Reads from its input, as JSON, a `Job`. Writes lines of JSON: {"unprotected": why} alone, or {} and then what each test
gave: {"output": what the program wrote}, {"result": what its function returned, as JSON in a text}, {"passed": true} or
{"failed": why}. The expected outputs of the first two kinds of tests never come here. Tests that are code run in a
process of their own; programs run in children of a process that was forked before the tests were read, so no memory
that a program can read has ever held a test. A program's output is read by descriptors that were opened before it
started. The standard library alone.
"""

import atexit
import builtins
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import IO, Any, NamedTuple

from megappo.runtime.keeper import die_with
from megappo.userland.channel import receive, send
from megappo.userland.graders.jail import answer, confine, limit, supervise
from megappo.userland.graders.remote_calls import MAX_BYTES, run_test, serve_names

MAX_OUTPUT_BYTES = 2**22
FILE_BYTES = MAX_OUTPUT_BYTES + 1
"""Largest file of a program, which may create jail.MAX_CREATED of them."""
MAX_REASON = 300
STDIN, STDOUT, STDERR, RESULT = range(4)
"""Descriptors of a program."""
LIBRARIES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
PRELUDE = "\n".join([*(f"from {name} import *" for name in LIBRARIES), *(f"import {name}" for name in LIBRARIES)])
"""Names that programs may use without importing them, as in LiveCodeBench and verl's prime_code."""
Outcome = dict[str, Any]


class Job(NamedTuple):
    """A program and its tests.

    Attributes:
        code: the program.
        tests: {"stdin": text}, {"function": name, "arguments": list} or {"test": code, "entry_point": name or null}.
            The process that runs programs gets one, and {} for the third kind.
        test_seconds: of each test; total_seconds: of all, those beyond fail.
        memory_bytes: of each.
        is_protected: False: limited, but not confined.
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
    runner, its_end = socket.socketpair()
    owner = os.getpid()
    if os.fork() == 0:
        die_with(owner)
        runner.close()
        _run_programs(its_end)
    its_end.close()
    job = Job(**json.load(sys.stdin))
    if job.is_protected and (reason := _why_unprotected()):
        return _write({"unprotected": reason})
    _write({})
    deadline = time.monotonic() + job.total_seconds
    for test in job.tests:
        _write(_outcome(runner, job, test, deadline))


def _run_programs(asked: socket.socket) -> None:
    """Run programs, and answer how each ended."""
    sys.dont_write_bytecode = True  # else this process would create files, and wait for its own permission
    exec(PRELUDE, {})  # once, not in each process
    listener = None
    with suppress(EOFError):
        while True:
            job = Job(*receive(asked, MAX_BYTES))
            _, descriptors, _, _ = socket.recv_fds(asked, 1, RESULT + 1)
            if job.is_protected and listener is None:
                listener = supervise()
            program = partial(_child, descriptors, job, partial(_ending, job.code, job.tests[0]))
            send(asked, _run(program, job.test_seconds, listener))
            for descriptor in descriptors:
                os.close(descriptor)
    os._exit(0)


def _write(outcome: Outcome) -> None:
    print(json.dumps(outcome), flush=True)


def _why_unprotected() -> str:
    """Return why processes cannot be confined; "" if they can."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            supervise()
            confine("/dev", memory_bytes=2**40, cpu_seconds=60, file_bytes=0)
            os.write(theirs, b"confined")
        except Exception as error:
            os.write(theirs, str(error).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    reason = os.read(ours, 1000).decode()
    os.close(ours)
    _, status = os.waitpid(pid, 0)
    if reason == "confined":
        return ""
    return reason or f"it ended a process ({os.waitstatus_to_exitcode(status)})"


def _outcome(runner: socket.socket, job: Job, test: dict[str, Any], deadline: float) -> Outcome:
    """Run one test in a fresh folder."""
    seconds = min(job.test_seconds, deadline - time.monotonic())
    if seconds <= 0:
        return {"failed": f"no time was left of {job.total_seconds:g} seconds"}
    folder = tempfile.mkdtemp(dir=job.folder)
    files = [tempfile.TemporaryFile(dir=folder, buffering=0) for _ in range(RESULT + 1)]  # noqa: SIM115
    ours, theirs = socket.socketpair()
    try:
        files[STDIN].write(test.get("stdin", "").encode(errors="replace"))
        files[STDIN].seek(0)
        descriptors = [file.fileno() for file in files]
        shown = {name: test[name] for name in ("stdin", "function", "arguments") if name in test}
        one = job._replace(tests=[shown], test_seconds=seconds, folder=folder)
        send(runner, one)
        socket.send_fds(runner, [b"."], [*descriptors[:RESULT], theirs.fileno() if "test" in test else descriptors[-1]])
        theirs.close()
        examined = 0
        if "test" in test:
            its_own = [descriptors[STDIN], descriptors[RESULT], descriptors[RESULT], ours.fileno()]
            examined = _run(partial(_child, its_own, one, partial(_examine, test)), seconds)
        ours.close()
        ended = receive(runner, MAX_BYTES)
        if None in (examined, ended):
            return {"failed": f"took longer than {seconds:.3g} seconds"}
        return _outcome_of(files, ended or examined, test)
    finally:
        for file in files:
            file.close()
        subprocess.run(["rm", "-rf", folder])  # shutil cannot remove a thousand folders within each other


def _outcome_of(files: Sequence[IO[bytes]], status: int, test: dict[str, Any]) -> Outcome:
    """Return the outcome of a program that has ended."""
    if status != 0:
        why = (_read(files[STDERR]) + _read(files[RESULT])).decode(errors="replace").strip().rpartition("\n")[2]
        return {"failed": why[-MAX_REASON:] or f"ended with {status}"}
    if "test" in test:
        return {"passed": True}
    kind, name = (STDOUT, "output") if "stdin" in test else (RESULT, "result")
    found = _read(files[kind])
    if len(found) > MAX_OUTPUT_BYTES:
        return {"failed": f"wrote more than {MAX_OUTPUT_BYTES} bytes"}
    return {name: found.decode(errors="replace")}


def _run(child: Callable[[], None], seconds: float, listener: int | None = None) -> int | None:
    """Run a child; return its exit code, or None if it took too long and was killed.

    Args:
        listener: what `jail.supervise` returned.
    """
    owner = os.getpid()
    if (pid := os.fork()) == 0:
        try:
            die_with(owner)
            child()
        finally:
            os._exit(1)
    ended = os.pidfd_open(pid)
    waiting = select.poll()
    for descriptor in filter(None, (ended, listener)):
        waiting.register(descriptor, select.POLLIN)
    deadline, ready, num_files = time.monotonic() + seconds, dict[int, int](), 0
    while ended not in ready and (left := deadline - time.monotonic()) > 0:
        ready = dict(waiting.poll(1000 * left))
        if listener in ready:
            num_files += answer(listener, num_files)
    os.close(ended)
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ended in ready else None


def _child(descriptors: Sequence[int], job: Job, work: Callable[[], int]) -> None:
    """Run a program, or a test, and end."""
    os.chdir(job.folder)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(RESULT + 1, min(os.sysconf("SC_OPEN_MAX"), 2**16))
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    written, status = sys.stdout, 1
    limits = {"memory_bytes": job.memory_bytes, "cpu_seconds": int(job.test_seconds) + 1, "file_bytes": FILE_BYTES}
    try:
        if job.is_protected:
            confine(job.folder, **limits)
        else:
            limit(**limits)
        status = work()
        _finish()
        for file in {sys.stdout, written}:
            with suppress(ValueError):  # it has been closed
                file.flush()
    except BaseException as error:
        status = 1
        os.write(STDERR, f"{type(error).__name__}: {str(error)[:MAX_REASON]}".encode(errors="replace"))
    os._exit(status)


def _examine(test: dict[str, Any]) -> int:
    try:
        run_test(socket.socket(fileno=RESULT), test["test"], test["entry_point"], LIBRARIES)
    except (EOFError, ConnectionError):  # the program has ended, and writes why itself
        return 1
    return 0


def _ending(code: str, test: dict[str, Any]) -> int:
    """Run a program; return the exit code that it ends with."""
    try:
        _execute(code, test)
    except SystemExit as ending:
        return 0 if ending.code in (None, 0) else 1
    return 0


def _execute(code: str, test: dict[str, Any]) -> None:
    """Run the program as a module that has the prelude's names among its built-in ones, then what the test calls."""
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
        with open(RESULT, "w", closefd=False) as file:
            file.write(json.dumps(function(*test["arguments"])))
    elif "stdin" not in test:
        with suppress(EOFError, ConnectionError):
            serve_names(socket.socket(fileno=RESULT), names)


def _prelude() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    return names | vars(builtins)


def _finish() -> None:
    """Do what Python does at exit."""
    while waiting := [one for one in threading.enumerate() if one is not threading.current_thread() and not one.daemon]:
        waiting[0].join()
    atexit._run_exitfuncs()


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES + 1)


if __name__ == "__main__":
    main()
