"""Tries a program on tests, each in a process of its own that can do little: `python -m megappo.rewards.trial`.

Reads from its input, as JSON, a `Job`; writes what each test gave: {"output": what the program wrote}, {"result": what
its function returned}, {"passed": true} or {"failed": why}; or {"unprotected": why} in place of all. The expected
outputs of the first two kinds of tests never come here: the program cannot find them. The standard library alone.
"""

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megappo.lifetime import die_with
from megappo.rewards.jail import Unprotected, confine, limit

MAX_OUTPUT_BYTES = 2**20
FILE_BYTES = 2**24
Outcome = dict[str, Any]


class Job(NamedTuple):
    """What is to be tried.

    Attributes:
        code: the program.
        tests: {"stdin": text}, {"function": name, "arguments": list} or {"test": code, "entry_point": name or null}.
        test_seconds: of each test; total_seconds: of all, those beyond fail.
        memory_bytes: of each.
        is_protected: False: without confinement, but for limits.
    """

    code: str
    tests: list[dict[str, Any]]
    test_seconds: float
    total_seconds: float
    memory_bytes: int
    is_protected: bool


def main() -> None:
    job = Job(**json.load(sys.stdin))
    if job.is_protected and (reason := _why_unprotected()):
        return print(json.dumps({"unprotected": reason}))
    deadline = time.monotonic() + job.total_seconds
    print(json.dumps([_outcome(job, test, deadline) for test in job.tests]))


def _why_unprotected() -> str:
    """ "" where processes can be confined."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            confine("/dev", memory_bytes=2**40, cpu_seconds=60, file_bytes=0)
        except (Unprotected, OSError) as error:
            os.write(theirs, str(error).encode())
        os._exit(0)
    os.close(theirs)
    os.waitpid(pid, 0)
    return os.read(ours, 1000).decode()


def _outcome(job: Job, test: dict[str, Any], deadline: float) -> Outcome:
    """Of one test, in a fresh folder."""
    seconds = min(job.test_seconds, deadline - time.monotonic())
    if seconds <= 0:
        return {"failed": f"no time was left of {job.total_seconds:g} seconds"}
    folder = Path(tempfile.mkdtemp(prefix="megappo_trial_"))
    try:
        (folder / "stdin").write_text(test.get("stdin", ""), errors="surrogateescape")
        token = os.urandom(16).hex()
        status = _run(lambda: _child(folder, job, test, token), seconds)
        if status is None:
            return {"failed": f"took longer than {seconds:.3g} seconds"}
        if status != 0:
            return {"failed": _read(folder / "stderr").strip().rpartition("\n")[2][-300:] or f"ended with {status}"}
        if "stdin" in test:
            return {"output": _read(folder / "stdout")}
        told = _read(folder / "result")
        if "function" in test:
            return {"result": json.loads(told)} if told else {"failed": "ended before its function had returned"}
        return {"passed": True} if told == token else {"failed": "ended before the test did"}
    except ValueError as error:
        return {"failed": str(error)[:300]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(child: Callable[[], None], seconds: float) -> int | None:
    """How a child ended; None: it took too long, and was killed."""
    sys.stdout.flush()
    owner = os.getpid()
    if (pid := os.fork()) == 0:
        die_with(owner)
        child()
        os._exit(0)
    descriptor = os.pidfd_open(pid)
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    has_ended = waiting.poll(1000 * seconds)
    os.close(descriptor)
    if not has_ended:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if has_ended else None


def _child(folder: Path, job: Job, test: dict[str, Any], token: str) -> None:
    """Run the program; does not return."""
    os.chdir(folder)
    for descriptor, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        os.dup2(os.open(name, flags | os.O_CREAT, 0o600), descriptor)
    os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 2**16 else 2**16)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    limits = {"memory_bytes": job.memory_bytes, "cpu_seconds": int(job.test_seconds) + 1, "file_bytes": FILE_BYTES}
    code, status = job.code, 1
    try:
        if job.is_protected:
            confine(str(folder), **limits)
        else:
            limit(**limits)
        del job, limits
        _execute(code, test, token)
        status = 0
    except SystemExit as ending:
        status = 0 if ending.code in (None, 0) else 1
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {str(error)[:300]}".encode(errors="replace"))
    sys.stdout.flush()
    os._exit(status)


def _execute(code: str, test: dict[str, Any], token: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__" if "stdin" in test else "solution"}
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 100_000))
    exec(compile(code, "solution.py", "exec"), names)
    if "function" in test:
        owner = names["Solution"]() if isinstance(names.get("Solution"), type) else None
        function = getattr(owner, test["function"], None) or names[test["function"]]
        result = json.dumps(function(*test["arguments"]))
        Path("result").write_text(result)
    elif "test" in test:
        exec(compile(test["test"], "test.py", "exec"), names)
        if test["entry_point"]:
            names["check"](names[test["entry_point"]])
        Path("result").write_text(token)


def _read(file: Path) -> str:
    try:
        with open(file, "rb") as opened:
            return opened.read(MAX_OUTPUT_BYTES).decode(errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    main()
