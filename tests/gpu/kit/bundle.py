"""Build the parts that carry the GPU environment to a machine without a network.

    .venv-gpu/bin/python tests/gpu/kit/bundle.py [--list] [--part-mib 56] [--with PATH ...]

Start from the environment that `launch/setup.sh gpu` makes, with the Python version of the target (PYTHON=python3.12).
CUDA libraries keep the code of one GPU architecture. What the target must have itself stands in BORROWED. The output
folder gets the parts and manifest.json; pieces that have not changed are not compressed again.
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

from prune import prune

MIB = 2**20
REPOSITORY = Path(__file__).parents[3]
BORROWED = (
    *("nvidia-cu*", "nvidia-nv*", "cuda-toolkit"),
    *(
        "numpy",
        "scipy",
        "pandas",
        "pyarrow",
        "numba",
        "llvmlite",
        "sympy",
        "mpmath",
        "networkx",
        "lxml",
        "pillow",
        "onnx",
    ),
    *("grpcio", "tensorboard-data-server", "hf-xet", "cryptography"),
)
"""Distributions that the target brings, in any version: CUDA's libraries (but NCCL) and large ones beside them."""
LEFT_OUT = (
    *(
        "flashinfer-python",
        "flash-attn-4",
        "quack-kernels",
        "nvidia-cutlass-*",
        "nvidia-mathdx",
        "cuda-tile",
        "tilelang",
    ),
    *("nvidia-cudnn-frontend", "sgl-deep-*", "sgl-flash-mla", "nccl*", "nvshmem4py-cu13", "cuda-bindings", "cuda-core"),
    *("torchaudio", "torchcodec", "mistral_common", "deepseek-recipe", "modelscope*", "anthropic", "timm", "z3-solver"),
    *("tml-renderers", "llguidance", "openai-harmony", "pycryptodomex", "airportsdata", "py-spy", "datasets"),
    *("mypy", "ruff", "pip", "virtualenv", "hypothesis", "jedi", "ast_serialize", "librt", "cython", "megappo"),
    *("pytest*", "pre_commit", "nodeenv", "kernels*", "humming-kernels", "types-*", "wheel", "pybind11"),
)
"""Distributions that no stage imports, or that SGLang can do without (kernels that Triton's or torch's replace)."""
UNUSED_FILES = (
    *("*/__pycache__/*", "../*", "torch/include/*", "torch/share/*", "torch/bin/protoc*", "torch/test/*", "*/tests/*"),
    *("sglang/multimodal_gen/*", "sglang/test/*", "sglang/srt/rust_extensions/_[bgs]*.so"),
    *(
        "triton/backends/amd/lib/*",
        "triton/backends/nvidia/lib/cupti*",
        "triton/backends/nvidia/bin/*",
        "triton/instrumentation/*",
    ),
    *(
        "triton/_C/libproton.so",
        "pycountry/locales/*",
        "sgl_kernel/flash*.so",
        "sgl_kernel/infllm*.so",
        "sgl_kernel/sm100/*",
    ),
)
LARGE_FILE_BYTES, LARGE_DISTRIBUTION_BYTES = 20 * MIB, 8 * MIB
STRIPPED_BYTES = 4 * MIB
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 * MIB}]


@dataclass(frozen=True)
class Piece:
    """Files that are compressed together, each as (path, name in the archive)."""

    name: str
    files: tuple[tuple[Path, str], ...]

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path, _ in self.files)

    def key(self, architecture: int) -> str:
        """Return a name that changes with any of the files."""
        facts = [(name, path.stat().st_size, path.stat().st_mtime_ns) for path, name in self.files]
        digest = hashlib.sha256(json.dumps([architecture, facts]).encode()).hexdigest()
        return f"{self.name}-{digest[:16]}.tar.xz"


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name.lower(), pattern.lower()) for pattern in patterns)


def pieces_of(site: Path, extra: list[Path]) -> Iterator[Piece]:
    """Yield the environment's pieces, large files each by itself, small distributions together, then the extra paths."""
    together: list[tuple[Path, str]] = []
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        name = distribution.metadata["Name"]
        if (matches(name, BORROWED) and name != "nvidia-nccl-cu13") or matches(name, LEFT_OUT):
            continue
        names = sorted(str(file) for file in distribution.files or () if not matches(str(file), UNUSED_FILES))
        files = [(site / name, f"site/{name}") for name in names if (site / name).is_file()]
        large = [file for file in files if file[0].stat().st_size >= LARGE_FILE_BYTES]
        yield from (Piece(path.name, ((path, inside),)) for path, inside in large)
        rest = Piece(name, tuple(file for file in files if file not in large))
        if rest.num_bytes >= LARGE_DISTRIBUTION_BYTES:
            yield rest
        else:
            together += rest.files
    yield Piece("small", tuple(together))
    for path in extra:
        files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
        yield Piece(path.name, tuple((one, f"repository/{one.relative_to(REPOSITORY)}") for one in files))


def compress(piece: Piece, target: Path, architecture: int) -> None:
    """Write a piece as .tar.xz, its libraries pruned and stripped."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        temporary, pruned = Path(folder, "piece"), Path(folder, "library")
        with lzma.open(temporary, "wb", filters=FILTERS) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
            for path, name in piece.files:
                is_library = ".so" in path.name and path.stat().st_size >= STRIPPED_BYTES
                if is_library and ".libs/" not in name:  # those have sections that strip refuses
                    prune(path, pruned, architecture)
                    shutil.copymode(path, pruned)
                archive.add(pruned if is_library and ".libs/" not in name else path, name)
        temporary.rename(target)


def write_parts(files: list[Path], output: Path, part_bytes: int) -> list[dict[str, object]]:
    """Cut the pieces, one behind another, into parts; the order is the one in which they are unpacked."""
    for old in output.glob("part-*"):
        old.unlink()
    parts, stream = [], b""
    for file in files:
        stream += file.read_bytes()
    for number, start in enumerate(range(0, len(stream), part_bytes)):
        path = output / f"part-{number:02}"
        path.write_bytes(stream[start : start + part_bytes])
        parts.append({"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)})
    return parts


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "outputs" / "gpu-kit", help="folder for the parts")
    parser.add_argument("--part-mib", type=int, default=56, help="most MiB of a part (default: 56)")
    parser.add_argument("--architecture", type=int, default=90, help="of the target's GPU (default: 90, Hopper)")
    parser.add_argument(
        "--with", dest="extra", type=Path, nargs="*", default=[], help="paths of this repository to bring"
    )
    parser.add_argument("--list", action="store_true", help="print the pieces and their size without building anything")
    args = parser.parse_args()
    extra = [path.resolve() for path in args.extra]
    pieces = sorted(pieces_of(Path(sysconfig.get_path("purelib")), extra), key=lambda piece: -piece.num_bytes)
    folder = args.output / "pieces"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {piece.name: folder / piece.key(args.architecture) for piece in pieces}
    if not args.list:
        missing = [piece for piece in pieces if not paths[piece.name].exists()]
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            jobs = {piece.name: pool.submit(compress, piece, paths[piece.name], args.architecture) for piece in missing}
            for name, job in jobs.items():
                job.result()
                print(f"compressed {name}: {paths[name].stat().st_size / MIB:.1f} MiB", flush=True)
    for piece in pieces:
        packed = f"{paths[piece.name].stat().st_size / MIB:8.1f}" if paths[piece.name].exists() else "       ?"
        print(f"{piece.num_bytes / MIB:9.1f} MiB -> {packed} MiB  {piece.name}")
    if args.list:
        return
    parts = write_parts(list(paths.values()), args.output, args.part_mib * MIB)
    listed = [{"name": path.name, "bytes": path.stat().st_size} for path in paths.values()]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    (args.output / "manifest.json").write_text(
        json.dumps({"python": python, "parts": parts, "pieces": listed}, indent=1)
    )
    total = sum(part["bytes"] for part in parts)
    print(f"{len(parts)} parts, {total / MIB:.1f} MiB in all, in {args.output}, for Python {python}")


if __name__ == "__main__":
    main()
