"""Programs in responses: which tests they pass, and what they can reach."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from reward_pools import rows_of

from megappo.lab.graders.code import _tried, code, program_in, trials_of
from megappo.userland.rewards import load_reward

ROOT = Path(__file__).resolve().parents[2]
DOUBLE = {"inputs": ["3\n", "-4"], "outputs": ["6", "-8\n"]}
PRINTS_1 = {"inputs": [""], "outputs": ["1"]}
PRINTS_LIST = {"inputs": [""], "outputs": ["[1]"]}
SUM = {"inputs": [[1, 2], "3\n4"], "outputs": [3, [7]], "fn_name": "add"}
PAIR = {"inputs": [["a"]], "outputs": [["a", 1]], "fn_name": "pair"}
HUMAN_EVAL = {"test": "def check(candidate):\n    assert candidate(2) == 4\n", "entry_point": "square"}
IN_A_CLASS = "class Solution:\n    def first(self, rows: List[List[int]]) -> Optional[int]: return min(chain(*rows))"
FUTURE = """from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Three:
    n: int = 3
def f(): return Three().n
"""
GRADED = [
    ("Here:\n```python\nprint(2 * int(input()))\n```\nDone.", DOUBLE, 1.0),
    ("```py\nprint(1)\n```\nBetter:\n```\nprint(2 * int(input()))\n```", json.dumps(DOUBLE), 0.0),  # of no language
    ("```py\nprint(1)\n```\nBetter:\n```Python3.11\nprint(2 * int(input()))\n```", json.dumps(DOUBLE), 1.0),
    ("```python\nprint(6)", DOUBLE, 0.5),
    ("import sys\nprint(2 * int(sys.stdin.read()))\nsys.exit()", DOUBLE, 1.0),
    ("print(2 * int(input()))\nraise ValueError", DOUBLE, 0.0),
    ("print('6.0')", DOUBLE, 0.0),
    ("print(1/3)", {"inputs": [""], "outputs": ["0.33333333"]}, 1.0),
    ("print('a  b \\n\\n')", {"inputs": [""], "outputs": ["a b"]}, 1.0),
    ("print('a')", {"inputs": [""], "outputs": ["a\nb"]}, 0.0),
    ("def add(a, b): return a + b", SUM, 1.0),
    ("class Solution:\n    def add(self, a, b): return a + b", SUM, 1.0),
    ("def add(a, b): return 3", SUM, 0.5),
    ("def add(a, b): return object()", SUM, 0.0),
    ("def other(a, b): return a + b", SUM, 0.0),
    ("def pair(a): return (a, 1)", PAIR, 1.0),
    ("def square(n): return n * n", "assert square(3) == 9\nassert square(0) == 0", 1.0),
    ("def square(n): return n * 3", ["assert square(3) == 9", "assert square(0) == 0", "assert square(1) == 1"], 2 / 3),
    ("def square(n): return n * n", HUMAN_EVAL, 1.0),
    ("def square(n): return n + n + 1", HUMAN_EVAL, 0.0),
    ("import os\ndef square(n): os._exit(0)", HUMAN_EVAL, 0.0),  # what does not come to the end has not passed
    ("import sys\nsys.exit(0)", HUMAN_EVAL, 0.0),
    ("def f(:", DOUBLE, 0.0),
    ("import threading\nthreading.Timer(0.1, lambda: print(1)).start()", PRINTS_1, 1.0),
    ("import atexit\natexit.register(print, 1)", PRINTS_1, 1.0),
    ("import sys\nprint(1)\nsys.stdout.close()", PRINTS_1, 1.0),
    ("import os\nprint(1, flush=True)\nos.close(1)", PRINTS_1, 1.0),
    ("import os\nprint(1)\nos.close(1)", PRINTS_1, 0.0),
    ("import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(1)", PRINTS_1, 1.0),
    ("print(open('/dev/stdin').read())", {"inputs": ["1"], "outputs": ["1"]}, 1.0),
    (
        "import os, pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(1)) if os.path.dirname(__file__) else 0)",
        PRINTS_1,
        1.0,
    ),
    (IN_A_CLASS, {"inputs": [[[[1]]]], "outputs": [1], "fn_name": "first"}, 1.0),
    (FUTURE, {"inputs": [[]], "outputs": [3], "fn_name": "f"}, 1.0),
    ("", {"inputs": [[2, 3]], "outputs": [8], "fn_name": "pow"}, 0.0),  # what Python has is no program
    ("", "assert sqrt(4) == 2", 0.0),
    ("from math import *", "assert sqrt(4) == 2", 1.0),
    ("def area(r): return pi * r * r", "assert math.isclose(area(1), 3.14159, rel_tol=1e-3)", 1.0),
    ("def f(): return Counter('aab')", ["assert f() == collections.Counter(a=2, b=1)"], 1.0),
    ("math = 1", "assert math == 1", 1.0),
    ("print(math.gcd(*map(int, sys.stdin.read().split())), gcd(4, 6))", {"inputs": ["4 6"], "outputs": ["2 2"]}, 1.0),
    ("def f(x: List[int]) -> None: ...\nprint(heapq.nsmallest(1, [2, 1]))", PRINTS_LIST, 1.0),
    ("def f(x): return str(x)", {"inputs": [[12]], "outputs": ["12"], "fn_name": "f"}, 1.0),
    ("def f(x): return x", {"inputs": [[12]], "outputs": ["12"], "fn_name": "f"}, 1.0),
    ("def f(x): return x + 'a'", {"inputs": ["12", "b"], "outputs": ["12a", "ba"], "fn_name": "f"}, 1.0),
    ("for i in range(200000): print(i)", {"inputs": [""], "outputs": ["\n".join(map(str, range(200000)))]}, 1.0),
    ("import os\nos.write(3, b'[' * 10**5)\nos._exit(0)", {"inputs": [[1]], "outputs": [1], "fn_name": "f"}, 0.0),
    ("import os\nfor _ in range(50): os.mkdir('a'); os.chdir('a')\nprint(1)", PRINTS_1, 1.0),
    ("no program at all", DOUBLE, 0.0),
]


@pytest.mark.parametrize(("response", "label", "share"), GRADED, ids=range(len(GRADED)))
def test_the_share_of_tests_that_a_program_passes(response: str, label: object, share: float):
    assert code(response, label) == {"score": float(share == 1), "passed_frac": share}
    if 0 < share < 1:
        assert code(response, label, partial_credit=True)["score"] == share


@pytest.mark.parametrize("label", [None, 3, "", [], {}, {"inputs": [1], "outputs": []}, {"inputs": [], "outputs": []}])
def test_a_label_without_tests_is_refused(label: object):
    if label == "":
        assert trials_of(label) == ([{"test": "", "entry_point": None}], [None])
    else:
        with pytest.raises(ValueError, match="code needs tests as label, .*; found "):
            code("print(1)", label)


BLOCKS = [
    "{}",
    "```python\n{}\n```\nExample:\n```text\n5\n```\nThat is it.",
    "```python\n{}\n```\nRun it:\n```bash\npython x.py\n```\nIt prints\n```\n5\n```",
    "```cpp\nint x;\n```\nNow:\n```python\n{}\n```\ndone",
    "```cpp\nint x;\n```\nNow:\n```\n{}\n```\ndone",
    "```python3.11\n{}\n```",
    "```python\r\n{}\r\n```\r\nExample:\r\n```\r\n5\r\n```\r\n",
    "Here: ``` Python\n{}```",
    "``` python x.py\n{}\n````\n```json\n",
    "```python\n1\n```\n```python\n{}",
]


@pytest.mark.parametrize("response", BLOCKS)
def test_the_program_of_a_response(response: str):
    assert program_in(response.format("x = 1\ny")).split() == ["x", "=", "1", "y"]


LIMITS = {
    "time": ("while True: pass", {"test_seconds": 0.5}),
    "sleep": ("import time\ntime.sleep(54321)", {"test_seconds": 0.5}),
    "all time": ("import time\ntime.sleep(0.6)\nprint(1)", {"total_seconds": 0.5}),
    "memory": ("x = bytearray(2**28)\nprint(1)", {"memory_mib": 200}),
    "output": ("print('x' * 10**8)\nprint(1)", {}),
}


@pytest.mark.parametrize(("program", "options"), LIMITS.values(), ids=LIMITS)
def test_limits_hold(program: str, options: dict):
    start = time.monotonic()
    assert code(program, {"inputs": ["", ""], "outputs": ["1", "1"]}, **options)["passed_frac"] == 0.0
    assert time.monotonic() - start < 10


CALL = "import ctypes; assert ctypes.CDLL(None)."
PAIR_OF_SOCKETS = "import fcntl, socket, struct; pair = socket.socketpair(); "
REACHES = {
    "a file": "open({secret!r}).read()",
    "a file of the system": "open('/etc/passwd').read()",
    "a folder": "os.listdir({folder!r})",
    "a new file": "open({folder!r} + '/new', 'w')",
    "a file's end": "os.truncate({secret!r}, 0)",
    "a file's end by opening": "os.open({secret!r}, os.O_RDONLY | os.O_TRUNC)",
    "a file's name": "os.rename({secret!r}, 'mine')",
    "a file itself": "os.unlink({secret!r})",
    "a file's mode": "os.chmod({secret!r}, 0o777)",
    "a readable file's mode": "import sys; f = os.open(sys.prefix + '/pyvenv.cfg', 0); os.fchmod(f, 0o644)",
    "a readable file's owner": "import sys; f = os.open(sys.prefix + '/pyvenv.cfg', 0); os.fchown(f, -1, -1)",
    "a file's time": "os.utime({secret!r})",
    "a link": "os.link({secret!r}, 'mine')",
    "another's command": "open('/proc/%d/cmdline' % os.getppid())",
    "another's environment": "open('/proc/%d/environ' % os.getppid()).read()",
    "another's end": "os.kill(os.getppid(), 0)",
    "another's signals by a pipe": "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "a signal of a pipe": "import fcntl; fcntl.fcntl(0, 10, 9)",
    "another's signals by a socket": PAIR_OF_SOCKETS + "fcntl.ioctl(pair[0], 0x8901, struct.pack('i', os.getppid()))",
    "another's signals, too": PAIR_OF_SOCKETS + "fcntl.ioctl(pair[0], 0x8902, struct.pack('i', os.getppid()))",
    "another's queue of signals": CALL + "syscall({queue_call}, os.getppid(), 0, 128 * b'\\xff') == 0",
    "another's schedule": "os.sched_setscheduler(os.getppid(), os.SCHED_BATCH, os.sched_param(0))",
    "another's part of the disk": CALL + "syscall({disk_call}, 1, os.getppid(), 2 << 13 | 4) == 0",
    "memory beyond its own": "os.memfd_create('mine')",
    "a pipe with a name": "os.mkfifo('pipe')",
    "a child": "if not os.fork(): os._exit(0)",
    "a program": "os.execv('/bin/echo', ['echo', '1'])",
    "a shell": "assert os.system('true') == 0",
    "the network": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "a socket of the system": "import socket; socket.socket(socket.AF_UNIX)",
    "another's limits": "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
    "a system call": CALL + "syscall({socket_call}, 2, 1, 0) >= 0",
}

CALLS = ("socket_call", "queue_call", "disk_call")


def test_a_program_reaches_nothing_outside(tmp_path: Path):
    """Everything works where nothing is protected, so that it is the protection which refuses it."""
    (tmp_path / "secret").write_text("secret")
    calls = {"x86_64": (41, 129, 251), "aarch64": (198, 138, 30)}[os.uname().machine]
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"folder": str(tmp_path), "port": server.getsockname()[1], **dict(zip(CALLS, calls, strict=True))}
        programs = {name: body.format(secret=str(tmp_path / "secret"), **names) for name, body in REACHES.items()}
        tests = [f"import os\n{program}" for program in programs.values()]
        assert code("", tests)["passed_frac"] == 0.0, "nor does a test"
        called = {"inputs": [[test] for test in tests], "outputs": [1] * len(tests), "fn_name": "f"}
        assert code("def f(program):\n    exec(program, {})\n    return 1", called)["passed_frac"] == 0.0
        assert (tmp_path / "secret").read_text() == "secret" and os.listdir(tmp_path) == ["secret"]
        for program in programs.values():
            (tmp_path / "secret").write_text("secret")
            assert code(f"import os\n{program}\nprint(1)", PRINTS_1, unprotected=True)["score"] == 1.0, program


def test_a_program_may_use_its_folder_threads_and_libraries():
    program = """
import collections, heapq, json, math, random, re, tempfile, threading
import numpy
open("own", "w").write("1")
thread = threading.Thread(target=lambda: print(int(open("own").read()) + int(numpy.ones(2).sum())))
thread.start(); thread.join()
"""
    assert code(program, {"inputs": [""], "outputs": ["3"]})["score"] == 1.0


def test_a_thousand_folders_in_each_other_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import os\nfor _ in range(1200): os.mkdir('a'); os.chdir('a')\nprint(1)"
    assert code(program, PRINTS_1, unprotected=True)["score"] == 1.0
    assert os.listdir(tmp_path) == []


def test_a_trial_that_is_given_up_leaves_no_timer(tmp_path: Path):
    limits = {"test_seconds": 5, "total_seconds": 30, "memory_bytes": 2**30, "is_protected": True}
    outcomes = _tried({"code": "print(1)", "tests": [{"stdin": ""}] * 2, "folder": str(tmp_path), **limits})
    assert next(outcomes)["output"] == "1\n"
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    outcomes.close()
    for timer in timers:
        timer.join(5)
    assert timers and not any(timer.is_alive() for timer in timers)


def test_a_program_that_ends_its_trial_passes_nothing():
    program = "import os, signal\nif input() == '1': os.kill(os.getppid(), signal.SIGKILL)\nprint(1)"
    label = {"inputs": ["0", "1", "0"], "outputs": ["1"] * 3}
    assert code(program, label, unprotected=True)["passed_frac"] == 1 / 3


WITHOUT_LANDLOCK = """
import ctypes, struct
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x50000 | 38), (0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("@HP", len(steps), ctypes.addressof(program)), 0, 0) == 0
from megappo.lab.graders.code import code
label = {"inputs": [""], "outputs": ["1"]}
print(code("print(1)", label, unprotected=True)["score"])
code("print(1)", label)
"""


def test_nothing_is_run_where_it_cannot_be_protected():
    """A filter makes the kernel report that it has no Landlock, as older ones do."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_LANDLOCK], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "1.0\n"
    assert "RuntimeError: programs cannot be confined here: Unprotected: the kernel has no Landlock" in done.stderr
    assert "reward.options={code: {unprotected: true}}" in done.stderr


def test_by_name_with_options_as_rows_come():
    with load_reward("code", num_workers=2, timeout_seconds=60, options={"code": {"partial_credit": True}}) as pool:
        grades = pool.score(rows_of(["p"] * 3, ["print(6)", "print(2 * int(input()))", "no"], [DOUBLE] * 3))
    assert [(one.scores, one.parts) for one in grades] == [([n], {"passed_frac": n}) for n in (0.5, 1.0, 0.0)]
