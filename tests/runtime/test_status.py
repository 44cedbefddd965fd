"""The display of a process: on a terminal a line that other ranks' output does not break, in a log a line
for each 10 seconds of silence."""

import os
import pty
import re
import subprocess
import sys
import time
from typing import NamedTuple

import pytest
from program import REPOSITORY

RANK_0 = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
from megappo.runtime import status
from megappo.runtime.heartbeat import heartbeat
from megappo.runtime.status import STATUS
status.HEARTBEAT_SECONDS = 1.0
STATUS.start("imports")
with STATUS.step("engine start"):
    time.sleep(0.1)
heartbeat.enter("update_actor")
heartbeat.step, heartbeat.part = "step 3/9", "mini-batch 2 of 8"
heartbeat.count(128, 256, "responses", tokens=4000)
STATUS.ends_at = time.monotonic() + 3600
time.sleep(1.2)
print("WARNING (rank 0): a line", file=sys.stderr)
other.communicate()
time.sleep(1.2)
STATUS.stop()
print("the end")
"""
RANK_1 = """
import sys
from megappo.runtime.status import share_terminal
sys.stdin.read()
share_terminal()
print("WARNING (rank 1): another line")
"""
LINE = r"step 3/9: update actor, mini-batch 2 of 8, 128 of 256 responses, [\d,]+ tokens/s, \d s, about "
LINE += r"(1:00:00|0:59:5\d) left"


class Silence(NamedTuple):
    """The longest time in which a command wrote nothing, in seconds, and the end of what it had written before."""

    seconds: float
    after: str


def watched(command: list[str], *, terminal: bool = True, **settings: object) -> tuple[str, Silence, int]:
    """Return what a command writes to a terminal, or to a pipe, its longest silence, and its exit code."""
    reader, writer = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(command, stdin=0, stdout=writer, stderr=writer, cwd=REPOSITORY, **settings) as process:
        os.close(writer)
        written, longest, last = b"", Silence(0.0, ""), time.monotonic()
        while True:
            try:
                part = os.read(reader, 65536)
            except OSError:  # all processes have closed the terminal
                part = b""
            now = time.monotonic()
            longest = max(longest, Silence(now - last, written[-200:].decode(errors="replace")))
            last = now
            written += part
            if not part:
                break
    os.close(reader)
    return written.decode(errors="replace"), longest, process.returncode


def screen(written: str) -> list[str]:
    """Return the lines that a wide terminal shows: a carriage return leads to a line's start, \\x1b[2K clears it."""
    lines = []
    for line in written.split("\n"):
        shown = ""
        for part in re.split(r"(\x1b\[2K)", line):
            if part == "\x1b[2K":
                shown = ""
                continue
            for text in filter(None, part.split("\r")):
                shown = text + shown[len(text) :] if "\r" in part else shown + text
        lines.append(shown)
    return [line for line in lines if line]


def test_a_line_on_a_terminal_that_the_output_of_all_ranks_leaves_whole():
    written, longest, code = watched([sys.executable, "-c", RANK_0, RANK_1], env=os.environ | {"COLUMNS": "150"})
    assert code == 0 and longest.seconds < 2.0
    assert re.search(LINE, written)
    step, *rest = screen(written)
    assert re.fullmatch(r"  engine start +0\.1 s", step)
    assert rest == ["WARNING (rank 0): a line", "WARNING (rank 1): another line", "the end"]


def test_a_log_has_a_line_for_each_silence():
    done = subprocess.run([sys.executable, "-c", RANK_0, RANK_1], cwd=REPOSITORY, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "the end" and "\x1b" not in done.stdout
    heartbeats = [line for line in lines if re.fullmatch(rf"\d\d:\d\d:\d\d  {LINE}", line)]
    assert len(heartbeats) == 2


@pytest.mark.slow  # the suite has the same lines of a process that trains nothing
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("terminal", "num_steps", "most_seconds"), [(True, 12, 2.0), (False, 60, 12.0)])
def test_the_longest_silence_of_the_quickstart_an_evaluation_and_a_conversion(
    tmp_path, terminal, num_steps, most_seconds
):
    made, run, megappo = tmp_path / "made", tmp_path / "run", [sys.executable, "-m", "megappo"]
    data = [f"model.path={made}/model", f"data.train_files={made}/train.jsonl", f"data.val_files={made}/val.jsonl"]
    settings = [*data, f"trainer.output_dir={run}", f"trainer.total_steps={num_steps}"]
    silences, printed = {}, ""
    for name, command in {
        "preparation": [sys.executable, "tools/make_quickstart.py", "--output", str(made)],
        "quickstart": [*megappo, "train", "--nproc", "2", "configs/quickstart.yaml", *settings],
        "evaluation": [*megappo, "evaluate", str(run)],
        "conversion": [*megappo, "convert", "hf-to-megatron", "--input", f"{run}/hf_actor", "--output", f"{run}/mcore"],
    }.items():
        variables = os.environ | {"OMP_NUM_THREADS": "1"}
        written, silences[name], code = watched(command, terminal=terminal, env=variables)
        assert code == 0, written
        if name in ("preparation", "quickstart"):
            printed += written
    print(silences)
    assert max(silences.values()).seconds <= most_seconds
    if not terminal:
        lines = [line for line in printed.splitlines() if not re.match(r"\d\d:\d\d:\d\d  ", line)]
        assert len(lines) <= 80, "beside a line of heartbeat every ten seconds, and the lines of the set-up"
