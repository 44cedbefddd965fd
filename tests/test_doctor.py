"""The doctor finds this machine well, and each fault with its remedy."""

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megappo import doctor
from megappo.runtime import platform

ROOT = Path(__file__).resolve().parents[1]
Patch = pytest.MonkeyPatch


def examine(*checks: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [*prefix, sys.executable, "-m", "megappo.doctor", *checks]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_this_machine_is_well():
    result = examine()
    assert result.returncode == 0, result.stdout + result.stderr
    *lines, last = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[name, "ok"] for name in doctor.CHECKS]
    assert last == "nothing is wrong"


def test_a_low_limit_of_open_files_is_found_beside_what_is_well():
    result = examine("ports", "open_files", prefix=("bash", "-c", 'ulimit -n 256; exec "$@"', "-"))
    well, found, remedy, last = result.stdout.splitlines()
    assert last == "wrong: 1 of 2"
    assert result.returncode == 1 and well.split()[:2] == ["ports", "ok"]
    assert found.split(maxsplit=2) == ["open_files", "PROBLEM", "256 files for a process"]
    assert remedy.split()[0] == "remedy" and "--ulimit nofile=" in remedy


def without_sglang(patch: Patch) -> None:
    patch.setitem(sys.modules, "sglang", None)
    version = importlib.metadata.version

    def known(name: str) -> str:
        if name == "sglang":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    patch.setattr(importlib.metadata, "version", known)


def on_bare_gpus(patch: Patch) -> None:
    patch.setattr(platform, "has_cuda", lambda: True)
    patch.setattr(shutil, "which", lambda name: None)
    patch.setattr(sysconfig, "get_path", lambda name: "/none")


def with_cuda_build(patch: Patch) -> None:
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def refusing(*args: object, **options: object) -> None:
    raise RuntimeError("invalid device context")


FAULTS: dict[str, tuple[str, Callable[[Patch], None], str, str]] = {
    "no SGLang installed": ("packages", without_sglang, "sglang not installed", "bash launch/setup.sh"),
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
    "memory of others not to be read": (
        "handles",
        lambda patch: patch.setattr(doctor, "spawn", refusing),
        "RuntimeError: invalid device context",
        "--ipc=host",
    ),
    "no engine": ("engine", without_sglang, "not installed", "bash launch/setup.sh"),
    "a cache that nothing expands": (
        "variables",
        lambda patch: patch.setenv("TRITON_CACHE_DIR", "$SCRATCH/triton"),
        "TRITON_CACHE_DIR is '$SCRATCH/triton': expected a whole path",
        "export another value",
    ),
    "no loopback": (
        "ports",
        lambda patch: patch.setattr(doctor, "LOOPBACK", "192.0.2.77"),
        "cannot listen on 192.0.2.77",
        "ip link set lo up",
    ),
    "a container's shared memory": (
        "shared_memory",
        lambda patch: patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**26)),
        "0.06 GiB of /dev/shm are free",
        "--shm-size=8g",
    ),
    "no compiler": ("compiler", on_bare_gpus, "found none", "apt-get install g++"),
    "no nvcc": ("nvcc", on_bare_gpus, "found none", "CUDA_HOME="),
    "no headers": ("header", on_bare_gpus, "found none", "apt-get install python3-dev"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_its_remedy(fault, monkeypatch, capsys):
    check, break_it, found, remedy = FAULTS[fault]
    break_it(monkeypatch)
    assert doctor.main([check]) == 1
    *problem, last, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "wrong: 1 of 1"
    assert problem[0].split()[:2] == [check, "PROBLEM"] and found in "\n".join(problem)
    assert last.split()[0] == "remedy" and remedy in last


def test_every_check_is_seen_to_fail():
    assert {check for check, *_ in FAULTS.values()} | {"open_files"} == doctor.CHECKS.keys()
