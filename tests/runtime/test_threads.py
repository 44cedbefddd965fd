"""Background threads that an exception ends: each is reported once and counted, whoever's thread it is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MEMORY = """
import resource
from megappo.observe.timers import PhaseMemory
memory = PhaseMemory()
memory.start("rollout")
memory.stop()
before = memory.metrics()
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # nothing more can be opened
memory._sampler.join(30)
after = memory.metrics()
assert "memory/rollout_peak_gib" in before and after == {}, (before, after)
"""
TENSORBOARD = """
import resource, time
from pathlib import Path
from megappo.observe.loggers import RunInfo
from megappo.observe.tensorboard_logger import TensorBoard
tensorboard = TensorBoard()
tensorboard.on_start(RunInfo(Path(FOLDER), total_steps=200))
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))  # as on a full disk
try:
    for step in range(200):
        tensorboard._writer.add_text("text", "x" * 1000, step)
        time.sleep(0.02)
except OSError:
    pass
"""
WATCHDOG = """
import time, torch.distributed as dist
from megappo.runtime.watchdog import Watchdog

class Store(dist.HashStore):
    def clone(self):
        return self
    def add(self, key, number):
        raise ValueError("no such number")

watchdog = Watchdog(Store(), 0, 1, 0.1)
while not FAILED:
    time.sleep(0.02)
"""
OURS = """
import threading
def fail():
    raise KeyError("lost")
for name in ("first", "second"):
    thread = threading.Thread(target=fail, name=name)
    thread.start()
    thread.join()
"""
LEAVES = """
import threading
thread = threading.Thread(target=exit, name="leaves")
thread.start()
thread.join()
"""
CASES = {
    "memory-sampler": (MEMORY, ["memory-sampler"], "OSError: [Errno 24] Too many open files"),
    "tensorboard": (TENSORBOARD, ["Thread-"], "OSError: [Errno 27] File too large"),
    "watchdog": (WATCHDOG, ["watchdog"], "ValueError: no such number"),
    "two": (OURS, ["first", "second"], "KeyError: 'lost'"),
    "one that leaves as it should": (LEAVES, [], ""),
}
"""A script, the threads that end in it, and why."""


@pytest.mark.parametrize("case", CASES)
def test_a_thread_that_an_exception_ends_is_reported_once_and_counted(case: str, tmp_path: Path) -> None:
    script, names, reason = CASES[case]
    start = "from megappo.runtime.failure import FAILED, report_failed_threads\nreport_failed_threads('rank 3')\n"
    source = f"FOLDER = {str(tmp_path)!r}\n{start}{script}\nprint(FAILED, flush=True)\nimport os\nos._exit(0)\n"
    done = subprocess.run([sys.executable, "-c", source], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counted = ast.literal_eval(done.stdout.splitlines()[-1])
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING (rank 3): the background thread")]
    assert len(counted) == len(warnings) == len(names) and "Traceback" not in done.stderr, done.stderr
    for line, name, found in zip(warnings, names, counted, strict=True):
        assert found.startswith(name) or name == "Thread-", found
        assert f"the background thread {found} ended, and its work is no longer done: {reason}" in line


def test_every_thread_of_ours_has_a_name_to_report_it_by() -> None:
    calls = [
        (path, node)
        for path in (REPOSITORY / "megappo").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Thread", "threading.Thread")
    ]
    assert len(calls) >= 8
    unnamed = [
        f"{path}:{node.lineno}" for path, node in calls if "name" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not unnamed
