"""Programs that take more of the machine than they may: threads, files, the kernel's memory, locks, what stays."""

import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest

from megappo.lab.graders.code import code
from megappo.lab.graders.jail import MAX_CREATED, MAX_OPEN_FILES, MAX_THREADS

TRIES = """
def taken(take, most):
    kept = []
    try:
        for number in range(most):
            kept.append(take(number))
    except (OSError, RuntimeError, MemoryError):
        pass
    return len(kept)
"""
THREADS = """
import _thread, threading, time
threading.stack_size(32768)
def start(number):
    threading.Thread(target=time.sleep, args=[1000], daemon=True).start()
"""
LOW_THREADS = (
    "import _thread, time\n_thread.stack_size(32768)\ndef start(number): _thread.start_new_thread(time.sleep, (9,))\n"
)
SOCKETS = "import socket\ndef start(number): return socket.socketpair()\n"
OPENS = "import os\ndef start(number): return os.open({}, os.O_RDWR | {})\n"
TAKES = {
    "threads": (THREADS, 3000, MAX_THREADS),
    "threads of a lower level": (LOW_THREADS, 3000, MAX_THREADS),
    "pairs of sockets": (SOCKETS, 500, MAX_OPEN_FILES // 2),
    "pipes": ("import os\ndef start(number): return os.pipe()\n", 500, MAX_OPEN_FILES // 2),
    "event descriptors": ("import os\ndef start(number): return os.eventfd(0)\n", 500, MAX_OPEN_FILES),
    "poll sets": ("import select\ndef start(number): return select.epoll()\n", 500, MAX_OPEN_FILES),
    "timers": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nt = ctypes.create_string_buffer(8)\ndef start(number):\n"
        "    if libc.timer_create(1, None, t): raise OSError\n",
        5000,
        MAX_OPEN_FILES,
    ),
    "files": ("def start(number): open(str(number), 'w').close()\n", 20_000, MAX_CREATED),
    "files of a lower level": (
        "import os\ndef start(number): os.close(os.open(str(number), os.O_CREAT))\n",
        20_000,
        MAX_CREATED,
    ),
    "files without a name": (OPENS.format("'.'", "os.O_TMPFILE"), 20_000, MAX_OPEN_FILES),
    "folders": ("import os\ndef start(number): os.mkdir(str(number))\n", 20_000, MAX_CREATED),
    "folders in folders": ("import os\ndef start(number): os.mkdir('a'); os.chdir('a')\n", 3000, MAX_CREATED),
    "links": ("import os\ndef start(number): os.symlink('/', str(number))\n", 20_000, 1),
    "names of a file": ("import os\nopen('a', 'w')\ndef start(number): os.link('a', str(number))\n", 20_000, 1),
    "sockets with names": (SOCKETS + "def start(number): socket.socketpair()[0].bind(str(number))\n", 20_000, 1),
    "MB": ("def start(number): open(str(number // 4), 'ab').write(bytes(2**20))\n", 2000, 4 * MAX_CREATED + 4),
    "MB of removed files": (
        "import os\ndef start(number):\n    f = open('a', 'ab')\n    f.write(bytes(2**22))\n"
        "    os.unlink('a')\n    return f\n",
        200,
        MAX_OPEN_FILES,
    ),
}


@pytest.mark.parametrize(("start", "wanted", "most"), TAKES.values(), ids=TAKES)
def test_a_program_takes_no_more_than_its_share(start: str, wanted: int, most: int):
    tested = start + TRIES + "\ndef f(n): return taken(start, n)"
    fits = max(0, min(20, most - 1))
    assert code(tested, f"assert f({fits}) == {fits}")["score"] == 1.0
    assert code(tested, f"assert {fits} <= f({wanted}) <= {most}")["score"] == 1.0


def test_what_many_threads_do_at_once_counts():
    program = THREADS + TRIES + "def start_both(n): return taken(start, n)\nimport concurrent.futures as c\n"
    program += "def f(n):\n    with c.ThreadPoolExecutor(8) as pool: return sum(pool.map(start_both, [n] * 8))\n"
    assert code(program, f"assert 40 <= f(500) <= {MAX_THREADS}")["score"] == 1.0


def test_threads_that_have_ended_do_not_count():
    program = "import threading\ndef f(n):\n    for _ in range(n):\n        t = threading.Thread(target=int)\n"
    program += "        t.start(); t.join()\n    return n"
    assert code(program, "assert f(500) == 500")["score"] == 1.0


HOLDS = {
    "a lease": "fcntl.fcntl(outside, 1024, fcntl.F_RDLCK)",
    "a lease on its own file": "fcntl.fcntl(os.open('own', os.O_CREAT), 1024, fcntl.F_WRLCK)",
    "a watch by inotify": "assert libc.inotify_init1(0) >= 0",
    "a watch by fanotify": "assert libc.syscall({fanotify}, 0x200, 0) >= 0",
    "a watch of a folder": "fcntl.fcntl(os.open(sys.prefix, os.O_RDONLY), 1026, 2)",
    "a lock": "fcntl.flock(outside, fcntl.LOCK_EX)",
    "a lock of bytes": "fcntl.lockf(outside, fcntl.LOCK_SH)",
    "a lock of bytes of a file": "fcntl.fcntl(outside, 37, struct.pack('hhqqi4x', 0, 0, 0, 0, 0))",
    "a large pipe": "fcntl.fcntl(os.pipe()[0], 1031, 2**20)",
    "descriptors on their way": "import socket; pair = socket.socketpair(); socket.send_fds(pair[0], [b'.'], [0] * 9)",
    "a folder that cannot be listed": "os.mkdir('a', 0o300)",
    "a folder that cannot be entered": "os.mkdir('a', 0o600)",
    "folders that cannot be listed": "os.umask(0o477)",
    "a folder without rights": "assert libc.mkdirat(-100, b'a', 0) == 0",
    "a life of its own": "assert libc.prctl(1, 0, 0, 0, 0) == 0",
    "locked memory": "assert libc.mlock(libc.malloc(2**22), 4096) == 0",
    "the kernel's messages": "assert libc.klogctl(10, 0, 0) >= 0",
    "a disk": "assert libc.syncfs(outside) == 0",
}
BEFORE = "import ctypes, fcntl, os, struct, sys\nlibc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_void_p\n"
BEFORE += "libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]\n"
BEFORE += "outside = os.open(sys.prefix + '/pyvenv.cfg', os.O_RDONLY)\n"
OF_ROOT = ("locked memory", "the kernel's messages")
"""Actions that only root may do in any case."""


def test_a_program_holds_and_watches_nothing_outside_and_leaves_nothing(tmp_path: Path, monkeypatch):
    """Everything works where nothing is protected, so that it is the protection which refuses it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fanotify = {"x86_64": 300, "aarch64": 262}[os.uname().machine]
    bodies = [body.format(fanotify=fanotify) for body in HOLDS.values()]
    label = {"inputs": [[body] for body in bodies], "outputs": ["done"] * len(bodies), "fn_name": "f"}
    program = BEFORE + "def f(body):\n    exec(body, globals())\n    return 'done'"
    for name, body in zip(HOLDS, bodies, strict=True):
        one = {"inputs": [[body]], "outputs": ["done"], "fn_name": "f"}
        is_possible = name not in OF_ROOT or os.getuid() == 0
        assert code(program, one, unprotected=True)["score"] == float(is_possible), name
    assert code(program, label)["passed_frac"] == 0.0
    assert os.listdir(tmp_path) == []


def test_the_memory_of_the_grader_does_not_grow_with_the_number_of_outputs():
    label = {"inputs": [""] * 8, "outputs": ["1"] * 8}
    tracemalloc.start()
    try:
        assert code(f"print('1' * {2**22 - 2})", label, total_seconds=100.0)["passed_frac"] == 0.0
        assert tracemalloc.get_traced_memory()[1] < 24 * 2**20
    finally:
        tracemalloc.stop()
