"""Tries a program on tests, each in a confined process of its own: `python -m megappo.lab.graders.trial`.

Reads from its input, as JSON, what `code.code` sends. Writes lines of JSON: {"unprotected": why} alone, or {} and then
for each test {"status": the exit code, null after too long, "output": what the program wrote, or what its function
returned, as JSON in a text}. The expected outputs never come here. Tests that are code run in a process of their own;
programs run in children of a process that was forked before the tests were read, so no memory that a program can read
has ever held a test. A program's output is read by descriptors that were opened before it started. The standard library
alone.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import IO, Any, NamedTuple

from megappo.lab.graders.jail import Unprotected, answer, confine, limit, supervise
from megappo.lab.graders.remote_calls import run_test, serve_names
from megappo.runtime.keeper import die_with

FILE_BYTES = 2**22 + 1
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


class Program(NamedTuple):
    """A program, and what a test shows it: {"stdin": text}, {"function": name, "arguments": list} or {}.

    Attributes:
        is_protected: False: limited, but not confined.
        folder: folder for what it writes.
    """

    code: str
    shown: dict[str, Any]
    seconds: float
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
    job = json.load(sys.stdin)
    if job["is_protected"]:
        nothing = _outcome(runner, job | {"code": ""}, {"stdin": ""}, 60.0)
        if nothing["status"] != 0:
            return _write({"unprotected": nothing["errors"]})
    _write({})
    deadline = time.monotonic() + job["total_seconds"]
    for test in job["tests"]:
        seconds = min(job["test_seconds"], deadline - time.monotonic())
        if seconds > 0:
            _write(_outcome(runner, job, test, seconds))
    return None


def _run_programs(asked: socket.socket) -> None:
    """Run programs, and answer how each ended. Each is in a file, whose descriptor comes with the program's own."""
    sys.dont_write_bytecode = True  # else this process would create files, and wait for its own permission
    exec(PRELUDE, {})  # once, not in each process
    listener = None
    while descriptors := socket.recv_fds(asked, 1, RESULT + 2)[1]:
        with open(descriptors.pop()) as file:
            program = Program(*json.load(file))
        try:
            if program.is_protected and listener is None:
                listener = supervise()
            run = partial(_child, descriptors, program, partial(_execute, program))
            status = _run(run, program.seconds, listener)
        except Unprotected as error:
            os.write(descriptors[STDERR], str(error).encode())
            status = 1
        asked.send(json.dumps(status).encode())
        for descriptor in descriptors:
            os.close(descriptor)
    os._exit(0)


def _write(outcome: dict[str, Any]) -> None:
    print(json.dumps(outcome, ensure_ascii=False), flush=True)


def _outcome(
    runner: socket.socket,
    job: Mapping[str, Any],
    test: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """Run one test in a fresh folder."""
    folder = tempfile.mkdtemp(dir=job["folder"])
    files = [tempfile.TemporaryFile(dir=folder, buffering=0) for _ in range(RESULT + 2)]  # noqa: SIM115
    descriptors = [file.fileno() for file in files]
    ours, theirs = socket.socketpair()
    try:
        shown = {} if "test" in test else test
        program = Program(job["code"], shown, seconds, job["memory_bytes"], job["is_protected"], folder)
        for descriptor, text in ((STDIN, test.get("stdin", "")), (RESULT + 1, json.dumps(program))):
            files[descriptor].write(text.encode(errors="replace"))
            files[descriptor].seek(0)
        result = theirs.fileno() if "test" in test else descriptors[RESULT]
        socket.send_fds(runner, [b"."], [*descriptors[:RESULT], result, descriptors[-1]])
        theirs.close()
        examined: int | None = 0
        if "test" in test:
            its_own = [descriptors[STDIN], descriptors[RESULT], descriptors[RESULT], ours.fileno()]
            examined = _run(partial(_child, its_own, program, partial(_examine, test)), seconds)
        ours.close()
        ended = json.loads(runner.recv(100))
        status = None if examined is None or ended is None else ended or examined
        written = files[RESULT if "function" in test else STDOUT]
        return {"status": status, "output": _read(written), "errors": _read(files[STDERR])}
    finally:
        for file in files:
            file.close()
        subprocess.run(["rm", "-rf", folder])  # shutil cannot remove a thousand folders within each other


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
    deadline = time.monotonic() + seconds
    ready = dict[int, int]()
    num_files = 0
    while ended not in ready and (left := deadline - time.monotonic()) > 0:
        ready = dict(waiting.poll(1000 * left))
        if listener in ready:
            num_files += answer(listener, num_files)
    os.close(ended)
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ended in ready else None


def _child(descriptors: Sequence[int], program: Program, work: Callable[[], None]) -> None:
    """Run a program, or its test, and end."""
    os.chdir(program.folder)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(RESULT + 1, min(os.sysconf("SC_OPEN_MAX"), 2**16))
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    written = sys.stdout
    status = 1
    limits = {"memory_bytes": program.memory_bytes, "cpu_seconds": int(program.seconds) + 1, "file_bytes": FILE_BYTES}
    try:
        if program.is_protected:
            confine(program.folder, **limits)
        else:
            limit(**limits)
        work()
        _finish()
        for file in {sys.stdout, written}:
            with suppress(ValueError):  # it has been closed
                file.flush()
        status = 0
    except BaseException as error:
        os.write(STDERR, f"{type(error).__name__}: {str(error)[:MAX_REASON]}".encode(errors="replace"))
    os._exit(status)


def _execute(program: Program) -> None:
    """Run the program as a module that has the prelude's names among its built-in ones, then what the test calls."""
    shown = program.shown
    module = ModuleType("__main__" if "stdin" in shown else "solution")
    sys.modules[module.__name__] = module
    names = vars(module)
    names["__file__"] = os.path.abspath("solution.py")
    names["__builtins__"] = _prelude()
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 100_000))
    try:
        exec(compile(program.code, "solution.py", "exec"), names)
    except SystemExit as ending:
        if ending.code not in (None, 0):
            raise
        return
    if "function" in shown:
        owner = names["Solution"]() if isinstance(names.get("Solution"), type) else None
        function = getattr(owner, shown["function"], None) or names[shown["function"]]
        with open(RESULT, "w", closefd=False) as file:
            file.write(json.dumps(function(*shown["arguments"])))
    elif "stdin" not in shown:
        with suppress(EOFError, ConnectionError):
            serve_names(socket.socket(fileno=RESULT), names)


def _examine(test: Mapping[str, Any]) -> None:
    run_test(socket.socket(fileno=RESULT), test["test"], test["entry_point"], LIBRARIES)


def _prelude() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    return names | vars(builtins)


def _finish() -> None:
    """Do what Python does at exit."""
    while waiting := [one for one in threading.enumerate() if one is not threading.current_thread() and not one.daemon]:
        waiting[0].join()
    atexit._run_exitfuncs()


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


if __name__ == "__main__":
    main()
