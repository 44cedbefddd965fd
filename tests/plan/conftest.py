"""A run to plan, and the dry run in this process."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from planning import plan_here, write_run


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.fixture
def plan() -> Callable[..., subprocess.CompletedProcess]:
    return plan_here
