"""Pack the GPU environment into parts for a machine without a network.

    .venv-gpu/bin/python tests/gpu/kit/bundle.py [--list] [--part-mib 56] [--with PATH ...]

Run it in the environment that `launch/setup.sh gpu` makes, with the Python version of the target (PYTHON=python3.12).
CUDA libraries keep the code of one GPU architecture; packages.txt lists the omitted packages. The output folder gets
the parts and manifest.json. A later build compresses only archives that have changed.
"""

import argparse
import fnmatch
import hashlib
import importlib.metadata
import json
import lzma
import os
import shutil
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prune import prune

MIB = 2**20
WANTED_MIB = 300
REPOSITORY = Path(__file__).resolve().parents[3]
OUTPUT = REPOSITORY / "outputs" / "gpu-kit"
LARGE_FILE_BYTES, LARGE_DISTRIBUTION_BYTES = 20 * MIB, 8 * MIB
STRIPPED_BYTES = 4 * MIB
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 * MIB}]


@dataclass(frozen=True)
class Archive:
    """Files that are compressed together, each as (path, name inside)."""

    name: str
    files: tuple[tuple[Path, str], ...]

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path, _ in self.files)

    def key(self, architecture: int) -> str:
        """Return a file name that changes whenever one of the files does."""
        facts = [(name, path.stat().st_size, path.stat().st_mtime_ns) for path, name in self.files]
        digest = hashlib.sha256(json.dumps([architecture, facts]).encode()).hexdigest()
        return f"{self.name}-{digest[:16]}.tar.xz"


def read_patterns() -> dict[str, list[str]]:
    """Return the sections of packages.txt: title up to its colon -> patterns."""
    patterns: dict[str, list[str]] = {}
    title = ""
    for line in Path(__file__).with_name("packages.txt").read_text().splitlines():
        if line.startswith("  "):
            patterns[title] += line.split()
        elif line and not line.startswith("#"):
            title = line.partition(":")[0]
            patterns[title] = []
    return patterns


def left_out() -> list[str]:
    """Return the patterns of the distributions that are not packed and that the target need not have: the patterns of
    packages.txt, and the developer tools that the program does not need."""
    tools, needed = pins("requirements-dev.txt"), pins("requirements.txt") | pins("requirements-gpu.txt")
    return [*read_patterns()["left out"], *sorted(tools - needed)]


def pins(name: str) -> set[str]:
    """Return the distributions of a requirements file."""
    lines = (REPOSITORY / name).read_text().splitlines()
    return {canonical(line.partition("==")[0]) for line in lines if "==" in line and not line.startswith("#")}


def canonical(name: str) -> str:
    """Return the one spelling of a distribution's name."""
    return name.strip().lower().replace("_", "-")


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(canonical(name), canonical(pattern)) for pattern in patterns)


def archives_of(site: Path, extra: list[Path]) -> Iterator[Archive]:
    """Yield an archive for each large file and large distribution, one for all small ones, one for each extra path."""
    patterns = read_patterns()
    together: list[tuple[Path, str]] = []
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        name = distribution.metadata["Name"]
        if matches(name, patterns["borrowed"] + left_out()):
            continue
        names = sorted(
            str(file) for file in distribution.files or () if not matches(str(file), patterns["skipped files"])
        )
        files = [(site / name, f"site/{name}") for name in names if (site / name).is_file()]
        large = [file for file in files if file[0].stat().st_size >= LARGE_FILE_BYTES]
        yield from (Archive(path.name, ((path, inside),)) for path, inside in large)
        rest = Archive(name, tuple(file for file in files if file not in large))
        if rest.num_bytes >= LARGE_DISTRIBUTION_BYTES:
            yield rest
        else:
            together += rest.files
    yield Archive("small", tuple(together))
    for path in extra:
        files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
        yield Archive(path.name, tuple((one, f"repository/{one.relative_to(REPOSITORY)}") for one in files))


def compress(archive: Archive, target: Path, architecture: int) -> None:
    """Write an archive as .tar.xz, its libraries pruned and stripped."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        temporary, pruned = Path(folder, "archive"), Path(folder, "library")
        with lzma.open(temporary, "wb", filters=FILTERS) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
            for path, name in archive.files:
                is_library = ".so" in path.name and path.stat().st_size >= STRIPPED_BYTES
                if is_library and ".libs/" not in name:  # strip refuses sections of libraries in .libs/
                    prune(path, pruned, architecture)
                    shutil.copymode(path, pruned)
                    tar.add(pruned, name)
                else:
                    tar.add(path, name)
        temporary.rename(target)


def compress_missing(archives: list[Archive], paths: dict[str, Path], architecture: int) -> None:
    """Compress the archives that have no file yet, several at a time."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        missing = [archive for archive in archives if not paths[archive.name].exists()]
        jobs = {archive.name: pool.submit(compress, archive, paths[archive.name], architecture) for archive in missing}
        for name, job in jobs.items():
            job.result()
            print(f"compressed {name}: {paths[name].stat().st_size / MIB:.1f} MiB", flush=True)


def write_parts(files: list[Path], output: Path, part_bytes: int) -> list[dict[str, Any]]:
    """Concatenate the compressed archives, cut the result into parts, and return the parts' manifest entries."""
    for old in output.glob("part-*"):
        old.unlink()
    stream = b"".join(file.read_bytes() for file in files)
    parts: list[dict[str, Any]] = []
    for number, start in enumerate(range(0, len(stream), part_bytes)):
        part = stream[start : start + part_bytes]
        path = output / f"part-{number:02}"
        path.write_bytes(part)
        parts.append({"name": path.name, "bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()})
    return parts


def report_sizes(parts: list[dict[str, Any]]) -> None:
    """Print the size of each part, and how far all are above the size that a bundle should have."""
    for part in parts:
        print(f"{part['bytes'] / MIB:9.1f} MiB  {part['name']}")
    total = sum(part["bytes"] for part in parts) / MIB
    above = (
        f", {total - WANTED_MIB:.1f} MiB above {WANTED_MIB}: README.md has the reasons" if total > WANTED_MIB else ""
    )
    print(f"{total:9.1f} MiB  together{above}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for the parts (default: outputs/gpu-kit)")
    parser.add_argument("--part-mib", type=int, default=56, help="largest size of a part (default: 56)")
    parser.add_argument("--architecture", type=int, default=90, help="of the target's GPU (default: 90, Hopper)")
    parser.add_argument(
        "--with", dest="extra", type=Path, nargs="*", default=[], help="files or folders of this repository to add"
    )
    parser.add_argument("--list", action="store_true", help="print the archives and their sizes, build nothing")
    args = parser.parse_args()
    extra = [path.resolve() for path in args.extra]
    if absent := [str(path) for path in extra if not path.exists()]:
        parser.error(f"--with: {', '.join(absent)}: no such file; bash launch/quickstart.sh makes outputs/quickstart")
    archives = sorted(archives_of(Path(sysconfig.get_path("purelib")), extra), key=lambda archive: -archive.num_bytes)
    folder = args.output / "pieces"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {archive.name: folder / archive.key(args.architecture) for archive in archives}
    if not args.list:
        compress_missing(archives, paths, args.architecture)
    for archive in archives:
        path = paths[archive.name]
        packed = f"{path.stat().st_size / MIB:8.1f}" if path.exists() else "       ?"
        print(f"{archive.num_bytes / MIB:9.1f} MiB -> {packed} MiB  {archive.name}")
    if args.list:
        return
    parts = write_parts(list(paths.values()), args.output, args.part_mib * MIB)
    listed = [{"name": path.name, "bytes": path.stat().st_size} for path in paths.values()]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    manifest = {"python": python, "parts": parts, "pieces": listed}
    (args.output / "manifest.json").write_text(json.dumps(manifest, indent=1))
    report_sizes(parts)
    print(f"wrote them for Python {python} to {args.output}, number of parts: {len(parts)}")


if __name__ == "__main__":
    main()
