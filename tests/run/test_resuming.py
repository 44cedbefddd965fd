"""A run restarted in its folder: the step it resumes from, its messages, and the files that it must not change."""

import shutil
from pathlib import Path

import pytest
from program import Program, logged

pytestmark = pytest.mark.timeout(600)


def test_a_finished_run_reports_that_and_changes_nothing(config, run, folder):
    before = contents(run)
    with Program(folder, config, f"trainer.output_dir={run}") as program:
        assert program.wait() == 0
    remedy = "raise trainer.total_steps to train on, or set another trainer.output_dir for a new run"
    assert program.output == f"already finished: {run} has all 10 steps; {remedy}\n"
    assert contents(run) == before


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def test_a_run_resumes_from_the_newest_intact_checkpoint(config, run, folder):
    """The newest checkpoint is damaged and `latest` is missing; a second run in the same folder is refused."""
    shutil.copytree(run, folder / "run")
    checkpoints = folder / "run" / "checkpoints"
    flip(sorted((checkpoints / "step_00000010" / "critic").glob("*.distcp"))[-1])
    (checkpoints / "latest").unlink()
    arguments = (config, f"trainer.output_dir={folder / 'run'}", "trainer.total_steps=11", "trainer.eval_interval=0")
    with Program(folder / "1", *arguments) as program:
        program.wait_until(lambda: "torch " in program.output)
        holder = program.ranks[0].pid
        with Program(folder / "2", *arguments) as second:
            assert second.wait(60) == 2
        assert program.wait() == 0, program.output
    assert second.output.startswith(f"error: command line: trainer.output_dir: {folder / 'run'} is in use by a run (")
    assert f", pid {holder}, since " in second.output and second.output.count("\n") == 1
    [warning] = [line for line in program.output.splitlines() if "is damaged" in line]
    damaged = f"{checkpoints}/step_00000010 is damaged: critic/__"
    assert warning.startswith(f"WARNING: {checkpoints}/latest cannot be read (No such file or directory); {damaged}")
    assert warning.endswith(f"; resuming from {checkpoints}/step_00000009")
    assert "changed since then: trainer.total_steps: 10 -> 11" in program.output
    assert [metrics["step"] for metrics in logged(folder / "run")] == list(range(12))
    assert (checkpoints / "latest").read_text() == "step_00000011\n"
    assert "Traceback" not in program.output


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
