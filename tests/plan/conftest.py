"""A run to plan, and the dry run in this process."""

import contextlib
import io
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from planning import write_run

from megappo.plan import main


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess]:
    """The command in this process, which has imported already what takes it a second."""

    def call(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.chdir(folder)
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(arguments)
            except SystemExit as end:
                code = end.code
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    return call
