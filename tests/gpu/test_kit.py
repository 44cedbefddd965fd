"""The GPU kit: packing an environment into parts, unpacking it, and what it refuses."""

import json
import shutil
import struct
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from gpu_kit import KIT, kit_module


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """Parts of an environment with a small package, one of CUDA's libraries and a developer tool, and the kit."""
    folder = tmp_path_factory.mktemp("bundle")
    venv.create(folder / "env", symlinks=True)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    texts = {"small_one": "answer = 42\n", "nvidia_cublas": "here = False\n", "kubernetes_validate": ""}
    for name, text in texts.items():
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (site / f"{name}.py").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"{name}.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    command = [folder / "env" / "bin" / "python", KIT / "bundle.py", "--output", folder / "out", "--with", KIT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "number of parts: 1" in done.stdout
    return folder / "out"


def unpack(repository: Path, folder: Path) -> subprocess.CompletedProcess:
    """Start unpack.py of a repository that has nothing but the kit."""
    shutil.copytree(KIT, repository / "tests" / "gpu" / "kit", dirs_exist_ok=True)
    command = [sys.executable, repository / "tests" / "gpu" / "kit" / "unpack.py", folder]
    return subprocess.run(command, capture_output=True, text=True)


def test_parts_become_an_environment_with_the_machines_packages_behind_its_own(bundle, tmp_path):
    done = unpack(tmp_path, bundle)
    assert done.returncode == 0, done.stderr
    question = "import small_one, torch; from importlib.util import find_spec as f; print(small_one.answer"
    question += ", f('nvidia_cublas'), f('kubernetes_validate'))"
    python = tmp_path / ".venv-gpu" / "bin" / "python"
    answer = subprocess.run([python, "-c", question], capture_output=True, text=True)
    assert answer.stdout == "42 None None\n", answer.stderr  # torch is this machine's, CUDA's libraries would be


def test_a_missing_or_damaged_part_is_named(bundle, tmp_path):
    parts = shutil.copytree(bundle, tmp_path / "parts")
    (parts / "part-00").write_bytes(b"x" + (parts / "part-00").read_bytes()[1:])
    assert (damaged := unpack(tmp_path, parts)).returncode == 3 and "part-00" in damaged.stderr
    (parts / "part-00").unlink()
    assert (missing := unpack(tmp_path, parts)).returncode == 3 and "part-00" in missing.stderr
    (parts / "manifest.json").unlink()
    assert (missing := unpack(tmp_path, parts)).returncode == 3 and "manifest.json" in missing.stderr
    assert not (tmp_path / ".venv-gpu").exists()


def test_an_environment_of_the_set_up_is_kept(bundle, tmp_path):
    stamp = tmp_path / ".venv-gpu" / "setup-stamp"
    stamp.parent.mkdir()
    stamp.write_text("gpu")
    assert unpack(tmp_path, bundle).returncode == 2 and stamp.exists()


def test_another_python_than_the_bundles_is_refused(bundle, tmp_path):
    parts = shutil.copytree(bundle, tmp_path / "parts")
    manifest = json.loads((parts / "manifest.json").read_text())
    (parts / "manifest.json").write_text(json.dumps(manifest | {"python": "3.9"}))
    done = unpack(tmp_path, parts)
    assert done.returncode == 2 and "the bundle is for Python 3.9" in done.stderr


def image(architecture: int, code: bytes) -> bytes:
    """A fat binary's image: kind, version, header's and code's bytes, then the architecture at byte 28."""
    header = struct.pack("<HHIQ", 2, 0x101, 64, len(code)) + bytes(12) + struct.pack("<I", architecture)
    return header.ljust(64, b"\0") + code


def test_other_architectures_code_becomes_zeros_in_place():
    prune = kit_module("prune")
    images = image(80, b"a" * 24) + image(90, b"h" * 32) + image(120, b"b" * 16)
    header = struct.pack("<IHHQ", prune.MAGIC, 1, 16, len(images))
    section = bytes(8) + header + images + bytes(32)  # binaries need not begin where the section does
    data = bytearray(section)
    assert prune._clear_images(data, 0, len(data), 90) == 40
    assert data == section.replace(b"a" * 24, bytes(24)).replace(b"b" * 16, bytes(16))


@pytest.mark.parametrize("script", ["bundle.py", "node.py", "report.py", "run.py", "unpack.py"])
def test_each_script_explains_itself(script):
    done = subprocess.run([sys.executable, KIT / script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_an_unknown_stage_is_refused():
    done = subprocess.run([sys.executable, KIT / "run.py", "quickstrat"], capture_output=True, text=True)
    assert done.returncode == 2 and "no stage quickstrat: choose from doctor, imports, chosen_attention" in done.stderr
