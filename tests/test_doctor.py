"""The doctor finds nothing wrong with this machine, and reports each fault with its remedy."""

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slow import slow_ones

from megappo.commands import arguments, doctor
from megappo.runtime import platform

ROOT = Path(__file__).resolve().parents[1]
Patch = pytest.MonkeyPatch


def examine(*checks: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [*prefix, sys.executable, "-m", "megappo", "doctor", *checks]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_nothing_is_wrong_with_this_machine():
    result = examine()
    assert result.returncode == 0, result.stdout + result.stderr
    *lines, last = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[name, "ok"] for name in doctor.CHECKS]
    assert list(doctor.CHECKS) == list(arguments.CHECKS)
    assert last == "nothing is wrong"


def test_a_low_limit_of_open_files_is_found_beside_a_check_that_passes():
    result = examine("gpus", "limits", prefix=("bash", "-c", 'ulimit -n 256; exec "$@"', "-"))
    passed, found, remedy, last = result.stdout.splitlines()
    assert last == "wrong: 1 of 2"
    assert result.returncode == 1 and passed.split()[:2] == ["gpus", "ok"]
    assert found.split()[:2] == ["limits", "PROBLEM"] and ", 256 files for a process: expected " in found
    assert remedy.split()[0] == "remedy" and "--ulimit nofile=" in remedy


def without_sglang(patch: Patch) -> None:
    patch.setitem(sys.modules, "sglang", None)
    version = importlib.metadata.version

    def known(name: str) -> str:
        if name == "sglang":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    patch.setattr(importlib.metadata, "version", known)


def with_broken_megatron(patch: Patch) -> None:
    Path("megatron").mkdir()
    Path("megatron", "__init__.py").write_text("raise ImportError('it is broken')")
    patch.syspath_prepend(Path.cwd())


def with_cuda_build(patch: Patch) -> None:
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


FAULTS: dict[str, tuple[str, Callable[[Patch], None], str, str]] = {
    "no SGLang installed": ("packages", without_sglang, "sglang not installed", "bash launch/setup.sh"),
    "a broken Megatron": ("megatron", with_broken_megatron, "ImportError: it is broken", "bash launch/setup.sh"),
    "no driver": ("gpus", with_cuda_build, "torch for CUDA 13.0 sees no GPU", "nvidia-smi"),
    "no such interface": (
        "collectives",
        lambda patch: [patch.setenv(f"{name}_SOCKET_IFNAME", "none0") for name in ("GLOO", "NCCL")],
        "none0",
        "unset NCCL_*",
    ),
    "TransformerEngine that is not there": (
        "attention",
        lambda patch: patch.setattr(platform, "has_transformer_engine", lambda: True),
        "transformer_engine",
        "model.layer_spec=torch",
    ),
    "no engine": ("engine", without_sglang, "not installed", "bash launch/setup.sh"),
    "a container's shared memory": (
        "limits",
        lambda patch: patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26)),
        "0.06 GiB of /dev/shm are free",
        "--shm-size=8g",
    ),
}


def test_a_home_that_cannot_be_written_is_found(monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert doctor.main(["limits"]) == 1 and "HOME or XDG_CACHE_HOME: cannot write in /proc (" in capsys.readouterr().out


@pytest.mark.parametrize("fault", slow_ones(FAULTS, ("no such interface",)))  # it starts processes
def test_a_fault_is_reported_with_its_remedy(fault, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    check, break_it, found, remedy = FAULTS[fault]
    break_it(monkeypatch)
    assert doctor.main([check]) == 1
    *problem, last, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "wrong: 1 of 1"
    assert problem[0].split()[:2] == [check, "PROBLEM"] and found in "\n".join(problem)
    assert last.split()[0] == "remedy" and remedy in last


def test_every_check_is_seen_to_fail():
    assert {check for check, *_ in FAULTS.values()} == doctor.CHECKS.keys()
