"""Conversions that end early: existing output stays, partial output does not."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import CONVERT, Result, contents, convert, environment, run
from slow import slow_ones
from tiny_models import hf_folder

COMMANDS = ("hf-to-megatron", "megatron-to-hf", "reshard")
CUT_SHORT = "could not be written to its end"
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1  # of linux/prctl.h, linux/capability.h


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the input of each command, large enough that writing takes a while."""
    root = tmp_path_factory.mktemp("sources")
    folder = hf_folder(root / "hf", "qwen2", vocab_size=400_000)
    convert("hf-to-megatron", folder, root / "megatron")
    return {"hf-to-megatron": folder, "megatron-to-hf": root / "megatron", "reshard": root / "megatron"}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return an output folder that is not empty."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "precious").write_text("kept")
    return folder


def limit_file_size() -> None:
    """Limit the size of files, which then fail to grow as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def obey_permissions() -> None:
    """Drop root's capability to ignore permissions, which takes effect in the exec that follows."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE)


def failed_once(done: Result, message: str, target: Path, code: int = 1) -> None:
    """Check that one line reports the error, and that the target is unchanged."""
    assert done.returncode == code, done.stdout + done.stderr
    assert message in done.stderr and done.stderr.startswith("error: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert contents(target.parent) == {"target/precious": b"kept"}


@pytest.mark.slow  # the next test has one of them, over several ranks
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk(sources: dict[str, Path], target: Path, command: str) -> None:
    arguments = ("--input", sources[command], "--output", target, "--force")
    done = run(CONVERT, command, *arguments, before=limit_file_size)
    failed_once(done, f"; {target} is as it was before", target)
    assert "File too large" in done.stderr or CUT_SHORT in done.stderr


def test_a_full_disk_of_several_ranks(sources: dict[str, Path], target: Path) -> None:
    arguments = ("--input", sources["reshard"], "--output", target, "--force", "--tensor", 2)
    done = run(CONVERT, "reshard", *arguments, ranks=2, before=limit_file_size)
    failed_once(done, f"; {target} is as it was before", target)
    assert "File too large" in done.stderr or CUT_SHORT in done.stderr  # the second, of what torch writes


@pytest.mark.parametrize("command", slow_ones(("hf-to-megatron", "megatron-to-hf"), ("hf-to-megatron",)))
def test_an_output_that_may_not_be_written(sources: dict[str, Path], target: Path, command: str) -> None:
    target.parent.chmod(0o555)
    try:
        arguments = ("--input", sources[command], "--output", target, "--force")
        done = run(CONVERT, command, *arguments, before=obey_permissions)
    finally:
        target.parent.chmod(0o755)
    failed_once(done, f"no permission to write to {target.parent}: name another folder", target, code=2)


def ended(
    command: str, source: Path, target: Path, end: Callable[[subprocess.Popen], object], ranks: int = 1
) -> tuple[int, str]:
    """Return exit code and standard error of a conversion that is disturbed while it writes."""
    torchrun = ["-m", "megappo.torchrun", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    arguments = [command, "--input", source, "--output", target, "--force", "--tensor", str(ranks)]
    program = [sys.executable, *torchrun, CONVERT, *arguments]
    process = subprocess.Popen(program, env=environment(), stderr=subprocess.PIPE, text=True)
    temporary = target.with_name("target.tmp")
    while process.poll() is None and not any(temporary.glob("[!.]*")):
        time.sleep(0.001)
    end(process)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("hf-to-megatron", signal.SIGINT),
        pytest.param("megatron-to-hf", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("hf-to-megatron", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("megatron-to-hf", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("reshard", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("reshard", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_conversion(
    sources: dict[str, Path], target: Path, command: str, number: signal.Signals
) -> None:
    found = ended(command, sources[command], target, lambda process: process.send_signal(number))
    assert found == (1, f"error: interrupted; {target} is as it was before\n")
    assert contents(target.parent) == {"target/precious": b"kept"}


INTERRUPTED_IN_A_DESTRUCTOR = """
import os, signal, sys, time
from megappo_tools.conversion import running

class Ending:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)

running._end_on_signals()
try:
    Ending()
    time.sleep(10)
except running.Interrupted:
    print("interrupted")
"""


def test_a_signal_is_not_lost_in_a_destructor() -> None:
    program = [sys.executable, "-c", INTERRUPTED_IN_A_DESTRUCTOR]
    done = subprocess.run(program, cwd=CONVERT.parents[1], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n", "", 0)


def test_what_a_killed_conversion_left_is_removed_by_the_next(sources: dict[str, Path], target: Path) -> None:
    command, temporary = "megatron-to-hf", target.with_name("target.tmp")
    assert ended(command, sources[command], target, lambda process: process.kill())[0] == -signal.SIGKILL
    assert temporary.exists(), "killed too late for this test to see anything"
    assert contents(target) == {"precious": b"kept"}
    (temporary / "left over").write_text("")
    convert(command, sources[command], target, "--force")
    assert not temporary.exists() and not (target / "left over").exists()


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """Return the process ids of torchrun's ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    variables = {child: Path(f"/proc/{child}/environ").read_bytes().split(b"\0") for child in children}
    return {
        int(variable.removeprefix(b"RANK=")): int(child)
        for child, found in variables.items()
        for variable in found
        if variable.startswith(b"RANK=")
    }


@pytest.mark.parametrize(
    ("command", "rank"),
    [
        ("hf-to-megatron", 1),
        *(pytest.param(command, 0, marks=pytest.mark.slow) for command in ("hf-to-megatron", "megatron-to-hf")),
        pytest.param("megatron-to-hf", 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank(sources: dict[str, Path], target: Path, command: str, rank: int) -> None:
    pids = {}

    def kill(process: subprocess.Popen) -> None:
        pids.update(ranks_of(process))
        os.kill(pids[rank], signal.SIGKILL)

    code, errors = ended(command, sources[command], target, kill, ranks=2)
    assert code == 1
    reported = [line for line in errors.splitlines() if line != f"{target} is as it was before"]
    assert len(reported) == 1 and reported[0].startswith(f"error: rank {rank} (pid {pids[rank]}, "), errors
    assert " was ended by SIGKILL" in reported[0]
    assert contents(target.parent) == {"target/precious": b"kept"}
    assert [path.name for path in target.parent.iterdir()] == ["target"]


@pytest.mark.slow  # tests/launch has the signals, the tests above a conversion that is interrupted
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_torchrun_is_interrupted(sources: dict[str, Path], target: Path, number: signal.Signals) -> None:
    code, errors = ended(
        "hf-to-megatron", sources["hf-to-megatron"], target, lambda process: process.send_signal(number), ranks=2
    )
    assert code == 128 + number
    assert sorted(errors.splitlines()) == sorted([f"{target} is as it was before", f"ended by {number.name}"])
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    assert contents(target.parent) == {"target/precious": b"kept"}
