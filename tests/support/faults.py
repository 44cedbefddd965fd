"""Runs that meet a fault at an exact point, and resume from the state that they had reported as saved."""

import json
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from commands import assert_equal, tensors_of
from program import OF_CLOCKS, Program, logged

AT_POINT = Path(__file__).parent / "at_point.py"
HAPPENED = re.compile(r"^at the point at (\d+\.\d+)$", re.MULTILINE)
REPORTED = re.compile(r"^checkpoint .*/(step_\d+(?:_\d+)?)$", re.MULTILINE)
OF_ACCIDENTS = re.compile(f"{OF_CLOCKS}|^checkpoint/failed_saves$")
GONE_SECONDS = 60
"""After which nothing may be left of a run that something has happened to."""
EXIT_CODES = {
    **{"kill rank": 1, "kill launcher": 128 + 9, "kill all": 128 + 9},
    **{"SIGTERM": 75, "SIGUSR1": 75, "SIGINT": 128 + 2},
    **{"stop": 1, "sleep": 1, "nan": 1, "other policy": 1},
}
"""As docs/troubleshooting.md has them."""
STEPS = 7
ON_RECORD = ("trainer.eval_interval=0", f"trainer.total_steps={STEPS}")
UPDATES = ("actor.ppo_epochs=3", "critic.ppo_epochs=2", "actor.ppo_mini_batch_size=8")
"""So that most of a step's time lies within updates: 4 of the critic, then 12 of the actor."""


@dataclass(frozen=True)
class Point:
    """Point of a run at which a fault is injected.

    Attributes:
        function: MODULE:NAME, looked up when the run starts.
        call: number of the call, counted from 1.
        rank: the rank that is hit.
        after: inject the fault after the call, not before it.
        again: inject it at all later calls, too.
    """

    function: str
    call: int = 1
    rank: int = 1
    after: bool = False
    again: bool = False


class Series:
    """Runs in one output folder, each resuming where the one before has ended."""

    def __init__(self, folder: Path, config: Path, *arguments: str):
        self.folder, self.out, self.number = folder, folder / "out", 0
        self.arguments = (config, f"trainer.output_dir={self.out}", *arguments)

    @property
    def latest(self) -> str:
        pointer = self.out / "checkpoints" / "latest"
        return pointer.read_text().strip() if pointer.exists() else ""

    def begin(self, whole: Path, steps: int) -> None:
        """Set up the folder as if the undisturbed run had ended after so many steps, with a checkpoint of each."""
        shutil.copytree(whole, self.out, ignore=shutil.ignore_patterns("hf_actor", "run.json"))
        for checkpoint in sorted((self.out / "checkpoints").glob("step_*"))[steps:]:
            shutil.rmtree(checkpoint)
        (self.out / "checkpoints" / "latest").write_text(f"step_{steps:08d}\n")

    def start(self, *more: str, environment: dict[str, str] | None = None) -> Program:
        self.number += 1
        return Program(self.folder / str(self.number), *self.arguments, *more, environment=environment)

    def harm(self, point: Point, fault: str, *more: str, code: int | None = None) -> str:
        """Run with a fault and return the output.

        The run must end as documented, at once, and keep everything that it reported as saved.
        """
        promised, at = self.latest, json.dumps(asdict(point) | {"fault": fault})
        with self.start(f"trainer.extensions=[{AT_POINT}]", *more, environment={"AT_POINT": at}) as program:
            found = program.wait()
            ended = time.time()
        output = program.output
        happened = HAPPENED.search(output)
        assert happened, f"{point} was not reached:\n{output}"
        seconds = ended - float(happened[1])
        print(f"{fault:13} {point.function:55} exit code {found:3}, gone after {seconds:4.1f} s, {self.latest}")
        assert found == (EXIT_CODES[fault] if code is None else code), output
        assert seconds < GONE_SECONDS
        self.check_kept(promised, output)
        return output

    def check_kept(self, promised: str, output: str) -> None:
        """Check that a run has resumed from the newest checkpoint, and that all reported checkpoints exist."""
        assert "Traceback" not in output and "is damaged" not in output, output
        assert not promised or f"from {self.out}/checkpoints/{promised}\n" in output, output
        assert self.latest >= max([promised, *REPORTED.findall(output)]), output

    def finish(self, whole: Path | None = None) -> str:
        """Run undisturbed to the end; if another run is given, the final state must be bitwise equal."""
        promised = self.latest
        with self.start() as program:
            assert program.wait() == 0, program.output

        self.check_kept(promised, program.output)
        if whole is not None:
            self.check_same(whole)
        return program.output

    def check_same(self, whole: Path) -> None:
        """Check that both runs have the same logged numbers and bitwise the same weights."""
        assert numbers(self.out) == numbers(whole)
        assert_equal(tensors_of(self.out / "hf_actor"), tensors_of(whole / "hf_actor"))


def numbers(out: Path) -> list[dict]:
    """Return each step's metrics without the metrics of clocks."""
    return [{key: value for key, value in step.items() if not OF_ACCIDENTS.search(key)} for step in logged(out)]


@pytest.fixture
def series(folder: Path, config: Path, record: Path) -> Series:
    """Return a series on the recorded rollouts that saves at each step."""
    return Series(folder, config, f"trainer.replay_rollouts={record}", "trainer.save_interval=1", *ON_RECORD, *UPDATES)
