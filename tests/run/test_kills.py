"""A run that is killed at any moment: no process stays behind, and no state that it reported as saved is lost."""

import random
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from program import Program, logged

pytestmark = pytest.mark.timeout(900)
ENDLESS = ("trainer.total_steps=100000", "trainer.eval_interval=0")
REPORTED = re.compile(r"^checkpoint .*/step_(\d+)$", re.MULTILINE)
GONE_WITHIN = 30.0
"""Seconds that a killed run may take to end; a rank waits 5 of them for the failed rank's report."""


class Series:
    """Runs in one folder, each resuming where the one before was killed."""

    def __init__(self, folder: Path, config: Path, save_interval: int):
        self.folder, self.number, self.saved = folder, 0, 0
        self.run = folder / "run"
        self.arguments = (config, f"trainer.output_dir={self.run}", f"trainer.save_interval={save_interval}")

    def start(self, *more: str) -> Program:
        self.number += 1
        return Program(self.folder / str(self.number), *self.arguments, *(more or ENDLESS))

    def note(self, program: Program) -> None:
        """Check after a run's end that it had resumed from the last save, and remember what it has saved."""
        going_on = re.search(r"^resuming after step (\d+) from", program.output, re.MULTILINE)
        if going_on:
            assert int(going_on[1]) >= self.saved, program.output
        assert "damaged" not in program.output and "starting from the beginning" not in program.output or not self.saved
        pointer = self.run / "checkpoints" / "latest"
        named = int(pointer.read_text().strip().removeprefix("step_")) if pointer.exists() else 0
        reported = max(map(int, REPORTED.findall(program.output)), default=0)
        assert named >= max(reported, self.saved), program.output
        self.saved = named

    def is_saving(self) -> bool:
        return any((self.run / "checkpoints").glob("step_????????.partial"))

    def wait_for_a_save(self, program: Program) -> None:
        """Wait until a save has begun, with frequent polls, as it takes a fraction of a second."""
        program.wait_until(lambda: len(REPORTED.findall(program.output)) > 0)
        deadline = time.monotonic() + 60
        while not self.is_saving():
            assert time.monotonic() < deadline and program.process.poll() is None, program.output
            time.sleep(0.001)

    def finish(self) -> None:
        """Run two more steps, to the end."""
        total = self.saved + 2
        with self.start(f"trainer.total_steps={total}", "trainer.eval_interval=0") as program:
            assert program.wait() == 0, program.output
        self.note(program)
        assert self.saved == total
        assert [metrics["step"] for metrics in logged(self.run)] == list(range(1, total + 1))


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.send_signal(signal.SIGKILL)


@pytest.mark.slow  # the fixture `run` is killed inside a save, too
def test_killed_inside_a_save(config, folder):
    """SIGKILL of all processes, torchrun too; the run then resumes."""
    series = Series(folder, config, save_interval=1)
    with series.start() as program:
        series.wait_for_a_save(program)
        kill([*program.ranks, psutil.Process(program.process.pid)])
        assert program.wait(GONE_WITHIN) == 128 + signal.SIGKILL
    series.note(program)
    assert series.saved >= 1
    series.finish()


@pytest.mark.slow  # the fixture `run` has a rank that is killed in a step, tests/checkpoint/test_store.py one in a save
def test_a_rank_killed_inside_a_save(config, folder):
    """The run ends at once and names the rank; it then resumes."""
    series = Series(folder, config, save_interval=1)
    with series.start() as program:
        series.wait_for_a_save(program)
        killed, began = program.ranks[1], time.monotonic()
        kill([killed])
        assert program.wait(GONE_WITHIN) != 0
        assert f"error: rank 1 (pid {killed.pid}, {socket.gethostname()}) was ended by SIGKILL" in program.output
        assert "Traceback" not in program.output
        assert time.monotonic() - began < GONE_WITHIN
    series.note(program)
    series.finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_killed_anywhere(config, folder, seed):
    """Five kills of each kind, two of them inside a save."""
    chance = random.Random(seed)
    series = Series(folder, config, save_interval=2)
    moments = ["save", "save", "step", "step", "start"]
    chance.shuffle(moments)
    for moment in moments:
        with series.start() as program:
            if moment == "start":
                time.sleep(chance.uniform(1, 15))
            else:
                series.wait_for_a_save(program)
                time.sleep(chance.uniform(0, 0.1 if moment == "save" else 3))
            torchrun = psutil.Process(program.process.pid)
            victims = chance.choice(["all", "all", "rank 0", "rank 1", "torchrun"])
            print(f"kill {victims} in a {moment}, saving: {series.is_saving()}", flush=True)
            ranks = program.ranks
            if victims.startswith("rank") and len(ranks) == 2:
                kill([ranks[int(victims[-1])]])
            else:
                kill([torchrun] if victims == "torchrun" else [*ranks, torchrun])
            assert program.wait(GONE_WITHIN) != 0
        series.note(program)
    series.finish()
