"""Disks that are full or read-only, and checkpoints that a disk has damaged.

A run reports the fault and loses no state that it has reported as saved. Once the fault is gone, it ends as an
undisturbed run does.
"""

import errno
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from damages import check_one_by_one, cut, files_of, flip
from faults import Series
from spawn import run_ranks
from tiny_run import reached

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MIB = 2**20


class Disk:
    """A file system of a few MiB in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def mount(self, options: str) -> str:
        """Why that is not possible here; "" when it is done."""
        command = ["mount", "-t", "tmpfs", "-o", options, "megappo-test", self.folder]
        return subprocess.run(command, capture_output=True, text=True).stderr.strip()

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", self.folder], check=False, capture_output=True)

    def fill(self) -> None:
        with (self.folder / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC

    def make_room(self) -> None:
        (self.folder / "filler").unlink()

    def forbid(self) -> None:
        """Between two saves, as no file may be open to be written."""
        while self.mount("remount,ro"):
            pass

    def allow(self) -> None:
        assert not self.mount("remount,rw")


@pytest.fixture
def disk(series: Series) -> Iterator[Callable[[str], Disk]]:
    """Mounts one in a folder of the series' output folder."""
    mounted: list[Disk] = []

    def mount(name: str) -> Disk:
        mounted.append(Disk(series.out / name))
        if refusal := mounted[-1].mount(f"size={8 * MIB}"):
            pytest.skip(f"no file system may be mounted: {refusal}")
        return mounted[-1]

    yield mount
    for disk in mounted:
        disk.unmount()


HARMS = {
    "full": (Disk.fill, Disk.make_room, "No space left on device"),
    "read-only": (Disk.forbid, Disk.allow, "Read-only file system"),
}
"""Faults of a disk: the fault, its repair, and the system's message."""


@pytest.mark.parametrize("harm", HARMS)
def test_a_disk_of_checkpoints_alone_that_takes_no_more(harm: str, series: Series, disk, whole):
    """Training continues without saves, and saves everything once the disk has room; the last save must succeed."""
    harmed, mended, message = HARMS[harm]
    checkpoints = disk("checkpoints")
    with series.start() as program:
        program.wait_until(lambda: reached(series.out, 2))
        harmed(checkpoints)
        promised = series.latest
        assert program.wait() == 1, program.output
    [warning, *_] = [line for line in program.output.splitlines() if line.startswith("WARNING")]
    assert message in warning and warning.endswith("the save is retried after the next step")
    assert "error (rank " in program.output and "Traceback" not in program.output
    assert series.latest == promised
    again_after(series, lambda: mended(checkpoints))
    series.finish(whole)


def again_after(series: Series, mend: Callable[[], None]) -> None:
    """Started again it meets the same; in the middle of that it is mended, and saves."""
    promised = series.latest
    with series.start() as program:
        program.wait_until(lambda: "WARNING: cannot save" in program.output)
        mend()
        program.wait_until(lambda: series.latest > promised)
        program.process.kill()
        assert program.wait(60) == 128 + 9
    series.check_kept(promised, program.output)


def test_a_disk_that_is_full(series: Series, disk, whole):
    """The metrics are on the same disk: the run ends with the remedy in its message."""
    out = disk("")
    with series.start() as program:
        program.wait_until(lambda: reached(series.out, 1))  # early: a step's metrics may just fit
        out.fill()
        assert program.wait() == 1, program.output
    assert "error (rank 0): No space left on device: " in program.output
    assert "make room on that disk, then start again: the run resumes from its newest checkpoint" in program.output
    assert "Traceback" not in program.output
    out.make_room()
    series.finish(whole)


def test_whatever_of_a_checkpoint_is_damaged_it_is_named_and_the_one_before_used(series: Series, whole):
    series.begin(whole, 3)
    checkpoints = series.out / "checkpoints"
    assert len(files_of(checkpoints / "step_00000003")) > 10
    run_ranks(2, check_one_by_one, whole / "checkpoints", checkpoints)


def test_a_run_whose_two_newest_checkpoints_are_damaged(series: Series, whole):
    """It resumes from the third newest, and ends as an undisturbed run does."""
    series.begin(whole, 4)
    checkpoints = series.out / "checkpoints"
    for step, damage in (("step_00000004", flip), ("step_00000003", cut)):
        for file in files_of(checkpoints / step):
            damage(file)
    with series.start() as program:
        assert program.wait() == 0, program.output
    assert f"{checkpoints}/step_00000004 is damaged: " in program.output
    assert f"; {checkpoints}/step_00000003 is damaged: " in program.output
    assert f"; resuming from {checkpoints}/step_00000002\n" in program.output
    series.check_same(whole)
