"""Faults of real runs: no state that a run has reported as saved is lost, nothing stays behind, and the exit code is
right.

| fault of the real program with two ranks | tests |
| --- | --- |
| SIGKILL of a rank, of the launcher, of all, at 25 points of a step; SIGTERM, SIGUSR1, SIGINT | test_points.py |
| the same at random points | test_kill_points.py, tests/run/test_kills.py |
| the same in rollouts, rewards and syncs, with engines | test_engines.py |
| one rank stopped, or sleeping forever | test_points.py, tests/run/test_endings.py |
| NaN on one rank | test_points.py, tests/run/test_bad_input.py |
| a worker of rewards or environments, or its keeper, stopped | tests/runtime/test_stopped_processes.py |
| an engine that is killed or stopped | tests/run/test_engine_faults.py |
| an engine that answers nonsense, or as another policy | test_engines.py |
| an engine's port stolen | test_engines.py, tests/run/test_bad_input.py |
| a reward worker that hangs, dies or eats memory | test_engines.py |
| a full disk, a read-only one | test_disks.py |
| bits flipped in, and an end cut off, every file of a checkpoint | test_disks.py, tests/checkpoint/test_damage.py |
| a node that is lost | tests/run/test_nodes.py |

Everything in this folder is `slow` except test_points_exist.py. Every test run covers a part of it: the fixture `run`
of tests/support/tiny_run.py (everything killed in a save, SIGTERM), tests/run/test_endings.py,
tests/run/test_resuming.py, tests/trainer/test_interrupted.py, tests/trainer/test_not_finite.py,
tests/trainer/test_saving.py, tests/launch, tests/checkpoint and tests/userland.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import ON_RECORD, UPDATES, series  # noqa: F401
from program import Program


@pytest.fixture(scope="session")
def record(config: Path) -> Iterator[Path]:
    """Rollouts of engines, to train on without them."""
    folder = Path(tempfile.mkdtemp(prefix="run-"))
    places = (f"trainer.output_dir={folder / 'out'}", f"trainer.record_rollouts={folder / 'record'}")
    try:
        with Program(folder, config, *places, "trainer.rollout_only=true", *ON_RECORD) as program:
            assert program.wait() == 0, program.output
        yield folder / "record"
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def whole(config: Path, record: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the record that nothing happens to, with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("whole")
    places = (f"trainer.output_dir={folder / 'out'}", f"trainer.replay_rollouts={record}")
    saves = ("trainer.save_interval=1", "trainer.keep_checkpoints=0")
    with Program(folder, config, *places, *saves, *ON_RECORD, *UPDATES) as program:
        assert program.wait() == 0, program.output
    return folder / "out"
