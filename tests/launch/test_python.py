"""Messages for a Python without the packages."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOOLS = sorted(path for path in (REPOSITORY / "tools").glob("*.py") if "__main__" in path.read_text())
MODULES = ("plan", "train", "torchrun", "serve", "doctor")


@pytest.mark.parametrize("command", [*([path] for path in TOOLS), *(["-m", f"megappo.{name}"] for name in MODULES)])
def test_every_command_names_the_python_that_has_them(command):
    """-S leaves this Python with its standard library alone."""
    done = subprocess.run(
        [sys.executable, "-S", *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith(f"error: this Python ({sys.executable}) lacks ")
    assert "transformers" in line and ": use .venv/bin/python, which launch/setup.sh makes" in line
