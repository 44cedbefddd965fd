"""A run restarted in its folder: the step it resumes from, its messages, and the files that it must not change."""

import re
from pathlib import Path

import pytest
from program import Program

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


def test_a_run_resumes_from_the_newest_intact_checkpoint(run):
    """The newest checkpoint was damaged, and `latest` was missing."""
    checkpoints, output = run / "checkpoints", (run.parent / "2" / "output.txt").read_text()
    [warning] = [line for line in output.splitlines() if "is damaged" in line]
    damaged, intact = re.fullmatch(".*; (.*) is damaged: critic/__.*; resuming from (.*)", warning).groups()
    reason = "No such file or directory: correct the path or its permissions"
    assert warning.startswith(f"WARNING: {checkpoints}/latest cannot be read ({reason}); {damaged}")
    steps = [int(path.removeprefix(f"{checkpoints}/step_")) for path in (damaged, intact)]
    assert steps in ([6, 3], [9, 6]) and f"resuming after step {steps[1]} from {intact}" in output
    assert "changed since then: trainer.num_samples: 8 -> 7" in output


def test_a_second_run_in_the_folder_is_refused(run):
    refused, holder = (run.parent / "refused" / "output.txt").read_text(), (run.parent / "holder").read_text()
    [error] = [line for line in refused.splitlines() if not re.match(r"\d\d:\d\d:\d\d  ", line)]  # without heartbeats
    assert error.startswith(f"error: command line: trainer.output_dir: {run} is in use by a run (")
    assert f", pid {holder}, since " in error
