"""The GPU environment's packages fit together, for each Python: resolved by pip from metadata alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = "pip==26.3"  # older ones download all wheels in a dry run, gigabytes
PLATFORMS = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(5, 35)]
PLATFORMS += ["--platform=manylinux2014_x86_64"]  # and what came before it
"""Platforms of wheels that run with glibc 2.34."""
WANTED = [
    "sglang",
    "fla-core",
    "pybind11",
    "ninja",
    "wheel",
    "transformer-engine",
    "transformer-engine-cu13",
    "torch",
    "torchvision",
    "torchaudio",
]
OF_TRANSFORMER_ENGINE_TORCH = ["einops", "onnxscript", "onnx", "packaging", "pydantic"]
"""Its requirements in its stead: it has no wheel, and its metadata come out of its build."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def lines(*files: str) -> list[str]:
    found = [line for file in files for line in (ROOT / file).read_text().splitlines()]
    return [line for line in found if line and not line.startswith("#")]


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def resolve(folder: Path, python: str) -> tuple[subprocess.CompletedProcess, Path]:
    """pip's dry run for another Python, on x86_64 with glibc 2.34, and where its report is."""
    own = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder / "pip", PIP]
    if subprocess.run(own, capture_output=True, timeout=60).returncode:
        pytest.skip(f"no index gives {PIP}")
    constraints, report = folder / "constraints.txt", folder / "report.json"
    pinned = [line for line in lines("requirements-gpu.txt") if not line.startswith("transformer-engine-torch=")]
    constraints.write_text("\n".join(pinned))
    options = ["--dry-run", "--ignore-installed", "--target", folder / "none", "--python-version", python, *PLATFORMS]
    options += ["--only-binary=:all:", "--use-feature=fast-deps", "--report", report, "-c", constraints]
    files = ["-r", ROOT / "requirements.txt", "-r", ROOT / "requirements-dev.txt"]
    command = [sys.executable, "-m", "pip", "install", *options, *files, *WANTED, *OF_TRANSFORMER_ENGINE_TORCH]
    environment = os.environ | {"PYTHONPATH": str(folder / "pip"), "PIP_CONSTRAINT": ""}
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, env=environment, timeout=240, **merged), report


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_packages_fit_together_and_all_are_pinned(python, tmp_path):
    result, report = resolve(tmp_path, python)
    assert result.returncode == 0, result.stdout
    assert "Downloading" not in result.stdout, "more than metadata was fetched"
    found = {canonical(item["metadata"]["name"]) for item in json.loads(report.read_text())["install"]}
    pins = {canonical(line.split("==")[0]) for line in lines(*(f"requirements{k}.txt" for k in ("", "-dev", "-gpu")))}
    assert sorted(found - pins) == []


def test_python_3_13_lacks_one_wheel(tmp_path):
    result, _ = resolve(tmp_path, "3.13")
    _, _, lacking = result.stdout.partition("have no matching distributions available for your environment:\n")
    assert lacking.split("\n\n")[0].strip() == "outlines-core", result.stdout
