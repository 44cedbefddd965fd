"""The keeper ends with its command, with its owner, and on SIGTERM; all of its descendants end with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
DETACH = """
import os, signal, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if (pid := os.fork()) == 0:
            time.sleep(54321)
        os.write(1, b"%d\\n" % pid)
        os._exit(0)
    os.wait()
"""
HANG = "time.sleep(54321)"


def keeper(code: str, owner: int | None = None, **pipes) -> subprocess.Popen:
    command = [sys.executable, "-m", "megappo.runtime.keeper", str(owner or os.getpid()), sys.executable, "-c", code]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **pipes)


def announced(process: subprocess.Popen) -> list[int]:
    """The pids that the command prints."""
    return [int(process.stdout.readline()) for _ in range(3)]


def descendants(pid: int, detached: list[int]) -> list[int]:
    """The pids of all that descends from a process, once the detached ones, whose parents may still end, are among
    its keeper's children."""
    found: list[int] = []

    def are_complete() -> bool:
        found[:] = [child.pid for child in psutil.Process(pid).children(recursive=True)]
        return set(detached) < set(found)

    wait_until(are_complete)
    return found


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("sys.exit(7)", 7), ("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("os.abort()", 134)],
)
def test_it_ends_as_its_command_does_with_all_that_was_detached(end: str, code: int):
    with keeper(DETACH + end) as process:
        detached = announced(process)
        assert process.wait(10) == code
    assert len(detached) == 3
    wait_until_gone(detached)


def test_sigterm_ends_everything_though_the_command_ignores_it():
    with keeper("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + DETACH + HANG) as process:
        try:
            detached = announced(process)
            everything = descendants(process.pid, detached)
        finally:
            process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM
    assert len(everything) >= 4
    wait_until_gone(everything)


OWNER = """
import subprocess, sys, os, time
command = [sys.executable, "-m", "megappo.runtime.keeper", str(os.getpid()), sys.executable, "-c", sys.argv[1]]
subprocess.Popen(command, start_new_session=True)
time.sleep(54321)
"""


def test_a_killed_owner_takes_everything_along():
    command = [sys.executable, "-c", OWNER, DETACH + HANG]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        try:
            detached = announced(owner)
            everything = descendants(owner.pid, detached)
        finally:
            owner.kill()
    assert len(everything) >= 5
    wait_until_gone(everything)


def test_repeated_sigterms_while_the_command_ends_print_nothing():
    ending = "import os\nfor _ in range(20): os.kill(os.getppid(), 15)\nos._exit(0)"
    for _ in range(5):
        with keeper(ending, stderr=subprocess.PIPE) as process:
            assert process.communicate(timeout=10) == ("", "")
        assert process.returncode == 128 + signal.SIGTERM


def test_it_does_not_start_for_an_owner_that_is_gone():
    with keeper("print('started')", owner=1) as process:
        assert process.communicate(timeout=10)[0] == ""
        assert process.returncode == 128 + signal.SIGTERM


def test_the_command_alone_has_the_input():
    with keeper("import sys; print(sys.stdin.read().upper())", stdin=subprocess.PIPE) as process:
        assert process.communicate("words", timeout=10)[0] == "WORDS\n"
        assert process.returncode == 0


def test_orphans_that_end_early_are_no_trouble():
    ending = "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        os.fork() or time.sleep(0.1)\n"
    ending += "        os._exit(1)\ntime.sleep(0.5)\nprint(len(os.listdir('/proc/self/fd')))"
    with keeper(ending) as process:
        assert process.communicate(timeout=10)[0].strip().isdigit()
        assert process.returncode == 0
