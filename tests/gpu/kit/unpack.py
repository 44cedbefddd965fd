"""Unpack the parts of bundle.py into .venv-gpu of this repository, on a machine with a GPU.

    python3 tests/gpu/kit/unpack.py FOLDER

FOLDER holds manifest.json and the parts. If parts are missing or damaged, their names are printed and the exit code is
3: copy them and start it again. It needs only Python's standard library, in the version that the bundle was built for.
Packages that the bundle leaves out come from the environment of the Python that runs this.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import site
import subprocess
import sys
import tarfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
ENVIRONMENT = REPOSITORY / ".venv-gpu"


def missing_parts(folder: Path, parts: list[dict]) -> list[str]:
    """Return the names of the parts that are missing or differ from the manifest."""
    missing = []
    for part in parts:
        path = folder / part["name"]
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != part["sha256"]:
            missing.append(part["name"])
    return missing


def extract(compressed: bytes, site_packages: Path) -> None:
    """Extract an archive: `site/` into the environment, `repository/` into the repository."""
    roots = {"site": site_packages, "repository": REPOSITORY}
    with tarfile.open(fileobj=io.BytesIO(compressed), mode="r:xz") as tar:
        for member in tar:
            kind, _, member.name = member.name.partition("/")
            tar.extract(member, roots[kind], filter="data")


def make_environment() -> Path:
    """Make an environment that falls back on this Python's packages; return its empty site-packages."""
    if ENVIRONMENT.exists():
        shutil.rmtree(ENVIRONMENT)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ENVIRONMENT], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = ENVIRONMENT / "lib" / version / "site-packages"
    own = [folder for folder in site.getsitepackages() if Path(folder).is_dir()]
    (packages / "machine.pth").write_text("\n".join([str(REPOSITORY), *own]) + "\n")
    return packages


def link_cuda(packages: Path) -> None:
    """Link the CUDA libraries of this Python's environment to where the bundle's torch expects them."""
    for folder in site.getsitepackages():
        for library in Path(folder, "nvidia").glob("*/"):
            target = packages / "nvidia" / library.name
            if not target.exists():
                target.parent.mkdir(exist_ok=True)
                target.symlink_to(library)


def link_ptxas(packages: Path) -> None:
    """Link the assembler that Triton's wheel has: the CUDA toolkit's, else the one in this Python's Triton."""
    target = packages / "triton" / "backends" / "nvidia" / "bin" / "ptxas"
    own = [f"{folder}/triton/backends/nvidia/bin/ptxas" for folder in site.getsitepackages()]
    found = next(filter(None, map(shutil.which, ("ptxas", "/usr/local/cuda/bin/ptxas", *own))), None)
    if found is None:
        print(
            "warning: no ptxas in PATH, /usr/local/cuda or Triton's wheel: kernels cannot be compiled", file=sys.stderr
        )
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of manifest.json and the parts")
    folder = parser.parse_args().folder
    if not (folder / "manifest.json").exists():
        print(f"missing: {folder}/manifest.json, which bundle.py writes beside the parts", file=sys.stderr)
        return 3
    manifest = json.loads((folder / "manifest.json").read_text())
    found = f"{sys.version_info.major}.{sys.version_info.minor}"
    if found != manifest["python"]:
        wanted = manifest["python"]
        remedy = f"run this with python{wanted}, or build it after PYTHON=python{found} bash launch/setup.sh gpu"
        print(f"error: the bundle is for Python {wanted}, this is {found}: {remedy}", file=sys.stderr)
        return 2
    if missing := missing_parts(folder, manifest["parts"]):
        print(f"missing or damaged: {' '.join(missing)}", file=sys.stderr)
        return 3
    if (ENVIRONMENT / "setup-stamp").exists():
        print(f"error: launch/setup.sh made {ENVIRONMENT}: use it, or remove it first", file=sys.stderr)
        return 2
    packages = make_environment()
    stream = b"".join((folder / part["name"]).read_bytes() for part in manifest["parts"])
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        jobs, start = [], 0
        for archive in manifest["pieces"]:
            jobs.append(pool.submit(extract, stream[start : start + archive["bytes"]], packages))
            start += archive["bytes"]
        for job in jobs:
            job.result()
    link_cuda(packages)
    link_ptxas(packages)
    subprocess.run([ENVIRONMENT / "bin" / "python", "-m", "compileall", "-q", "-j", "0", packages], check=False)
    print(f"unpacked {len(jobs)} archives into {ENVIRONMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
