"""Every stage of the smoke test by its command: at full size on a GPU, tiny on a CPU, so that none of it rots."""

import json
import subprocess
import sys

import pytest
from program import REPOSITORY

from megappo import platform

LIMITS = {
    "group": 120,
    "heads": 240,
    "attention": 300,
    "models": 600,
    "syncs": 300,
    "checkpoint": 300,
    "ipc": 300,
    "export": 240,
    "offload": 240,
}
"""Seconds at full size."""
SHOWN = ("heads", "attention")
"""On a CPU; the others are slow ones there."""


def stage(name: str, seconds: int):
    is_slow = not platform.has_cuda() and name not in SHOWN
    return pytest.param(name, seconds, marks=[pytest.mark.timeout(seconds + 30), *([pytest.mark.slow] * is_slow)])


@pytest.mark.parametrize(("name", "seconds"), [stage(*one) for one in LIMITS.items()])
def test_a_stage_finds_nothing_wrong(name: str, seconds: int) -> None:
    command = [sys.executable, f"tests/gpu/stages/{name}.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout)
    assert found["stage"] == name and (found["device"] == "cpu") != platform.has_cuda()


def test_there_is_no_other_stage() -> None:
    files = {path.stem for path in (REPOSITORY / "tests" / "gpu" / "stages").glob("*.py")}
    assert files - {"common", "engines"} == LIMITS.keys()
