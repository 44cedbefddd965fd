"""Packages and builds of torch that the set-up installs or refuses: a real pip with local indexes of dummy wheels."""

import functools
import io
import os
import socket
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH_FAMILY = ("torch", "torchvision", "torchaudio")
OTHERS = {"requirements.txt": ["six"], "requirements-dev.txt": ["pytest"]}
OTHERS |= {
    "requirements-cpu.txt": ["sglang"],
    "requirements-gpu.txt": ["sglang", "fla-core", "pybind11", "ninja", "wheel"],
}
BACKEND = """
import pathlib
def build_editable(folder, *args):
    wheel = next(pathlib.Path(__file__).parent.glob("megappo-*.whl"))
    return pathlib.Path(folder, wheel.name).write_bytes(wheel.read_bytes()) and wheel.name
"""
TRANSFORMER_ENGINE_BACKEND = """
import os, pathlib
def build_wheel(folder, *args):
    built_with = "\\n".join(os.environ[name] for name in ("CUDA_HOME", "CPLUS_INCLUDE_PATH"))
    pathlib.Path(os.environ["BUILT_WITH"]).write_text(built_with)
    wheel = next(pathlib.Path(__file__).parent.glob("*.whl"))
    return pathlib.Path(folder, wheel.name).write_bytes(wheel.read_bytes()) and wheel.name
"""


def make_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], requires: str = "", executable: str = "none"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"  # as wheels are named
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = files | {
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            mode = 0o755 if Path(path).name == executable else 0o644
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (stat.S_IFREG | mode) << 16
            archive.writestr(entry, text)


def pinned(kind: str) -> dict[str, str]:
    """Return the project's pins of torch and the packages built with it, without the builds' names."""
    lines = (ROOT / f"requirements-{kind}.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line.split("==")[0] in TORCH_FAMILY)
    return {name: version.removesuffix("+cpu") for name, version in pins.items()}


class Index:
    """A package index at 127.0.0.1, which records requested packages as FOLDER/NAME."""

    def __init__(self, folder: Path):
        self.folder, self.requested = folder, set()
        folder.mkdir()

        class Handler(SimpleHTTPRequestHandler):
            def log_message(handler, *args: object) -> None:
                self.requested.add(handler.path.rpartition("/")[0].strip("/"))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add_torch(self, kind: str, build: str = "", cuda: str | None = None, under: str = "") -> None:
        """Add torch and the packages built with it, pinned versions, in a build: '' (PyPI's), '+cpu', '+cu130'."""
        for name, version in pinned(kind).items():
            files = {f"{name}/__init__.py": "", f"{name}/version.py": f"cuda = {cuda!r}\n"}
            requires = "sympy" if name == "torch" else ""
            make_wheel(self.folder / under / name, name, version + build, files, requires)

    def add_others(self, torch: str) -> None:
        for name in {"sympy", *(name for names in OTHERS.values() for name in names)}:
            requires = f"torch=={torch}" if name == "sglang" else ""
            make_wheel(self.folder / name, name, "1.0", {f"{name}.py": ""}, requires)


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[tuple[Index, Index]]:
    """The index that pip is configured for, and PyTorch's."""
    both = Index(tmp_path / "configured"), Index(tmp_path / "pytorch")
    yield both
    for index in both:
        index.server.shutdown()
        index.server.server_close()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that copies one environment wherever it is to create one: that takes seconds."""
    folder = tmp_path_factory.mktemp("python")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=120)
    executable = folder / "python"
    create = f'[[ $2 == venv ]] && exec cp -a {folder}/venv "${{@: -1}}"'
    executable.write_text(f'#!/usr/bin/env bash\n{create}\nexec {sys.executable} "$@"\n')
    executable.chmod(0o755)
    return executable


@pytest.fixture
def set_up(tmp_path: Path, python: Path, indexes: tuple[Index, Index]) -> Callable[..., subprocess.CompletedProcess]:
    """(kind) -> launch/setup.sh run in a tiny repository that pins the same torch."""
    configured, pytorch = indexes
    repository = tmp_path / "repository"
    (repository / "launch").mkdir(parents=True)
    (repository / "megappo" / "runtime").mkdir(parents=True)
    for name in ("launch/setup.sh", "launch/waiting.sh", "megappo/runtime/torchvision_on_cpu.py"):
        (repository / name).write_text((ROOT / name).read_text())
    (repository / "setup.py").touch()
    (repository / "backend.py").write_text(BACKEND)
    make_wheel(repository, "megappo", "1.0", {})
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (repository / "pyproject.toml").write_text(system)
    for file, names in OTHERS.items():
        torch = [line for line in (ROOT / file).read_text().splitlines() if line.split("==")[0] in TORCH_FAMILY]
        (repository / file).write_text("\n".join(torch + [f"{name}==1.0" for name in names]) + "\n")
    # Values that are empty undo the values of the machine's own files.
    pip = tmp_path / "pip.conf"
    pip.write_text(f"[global]\nindex-url = {configured.url}\nextra-index-url =\nfind-links =\n")
    (tmp_path / "constraint.txt").write_text("torch==1.0\n")  # as in NVIDIA's containers
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    variables |= {"PIP_CONFIG_FILE": str(pip), "PIP_CONSTRAINT": str(tmp_path / "constraint.txt")}
    variables |= {"PYTORCH_INDEX": pytorch.url, "PYTHON": str(python), "TRANSFORMER_ENGINE": "no"}
    for name in ("CXX", "CUDA_HOME", "CPLUS_INCLUDE_PATH"):
        variables.pop(name, None)

    def run(kind: str, **environment: str) -> subprocess.CompletedProcess:
        command = ["bash", repository / "launch" / "setup.sh", kind]
        return subprocess.run(command, env=variables | environment, capture_output=True, text=True, timeout=240)

    return run


def installed(tmp_path: Path, folder: str) -> dict[str, str]:
    """Versions by name in an environment of the tiny repository."""
    found = (tmp_path / "repository" / folder).glob("lib/python*/site-packages/*.dist-info")
    return dict(path.name.removesuffix(".dist-info").split("-") for path in found)


def versions(kind: str, build: str) -> dict[str, str]:
    return {name: version + build for name, version in pinned(kind).items()}


def test_the_cpu_build_comes_from_pytorch_where_pip_finds_cuda_builds_alone(tmp_path, indexes, set_up):
    configured, pytorch = indexes
    configured.add_torch("cpu", cuda="13.0")
    configured.add_others("9.9")
    pytorch.add_torch("cpu", "+cpu", under="cpu")
    result = set_up("cpu", PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    assert versions("cpu", "+cpu").items() <= installed(tmp_path, ".venv").items()
    assert {"six", "pytest", "sglang", "megappo"} <= installed(tmp_path, ".venv").keys()
    assert pytorch.requested == {"cpu/torch", "cpu/torchvision"}, "other packages were looked up at PyTorch's index"
    assert f"from {pytorch.url}/cpu" in result.stdout
    assert set_up("cpu").stdout == "", "a second set-up does nothing"


@pytest.mark.slow  # the tests of a new environment distinguish the builds, too
def test_a_cuda_build_that_a_set_up_before_left_gives_way(tmp_path, indexes, set_up, python):
    configured, pytorch = indexes
    configured.add_torch("cpu", cuda="13.0")
    configured.add_others("9.9")
    pytorch.add_torch("cpu", "+cpu", under="cpu")
    environment = tmp_path / "repository" / ".venv"
    subprocess.run([python, "-m", "venv", environment], check=True, timeout=120)
    wheels = [*configured.folder.glob("torch*/*.whl")]
    install = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", *wheels]
    subprocess.run(install, env=os.environ | {"PIP_CONFIG_FILE": os.devnull}, check=True, timeout=120)
    assert set_up("cpu").returncode == 0
    assert versions("cpu", "+cpu").items() <= installed(tmp_path, ".venv").items()


def test_a_changed_pin_asks_no_index_for_torch_again(tmp_path, indexes, set_up):
    configured, _ = indexes
    configured.add_torch("cpu", "+cpu")
    configured.add_others("9.9")
    assert set_up("cpu").returncode == 0
    make_wheel(configured.folder / "six", "six", "2.0", {"six.py": ""})
    (tmp_path / "repository" / "requirements.txt").write_text("six==2.0\n")
    configured.requested.clear()
    assert set_up("cpu").returncode == 0
    assert installed(tmp_path, ".venv")["six"] == "2.0" and configured.requested == {"six"}


@pytest.mark.slow  # of the environment for GPUs, which no run on a CPU takes
def test_the_cpu_environment_has_transformer_engines_python_apart(tmp_path, indexes, set_up):
    configured, _ = indexes
    configured.add_torch("cpu", "+cpu")
    configured.add_others("9.9")
    for version in ("1.0", "2.0"):
        make_wheel(
            configured.folder / "transformer-engine", "transformer_engine", version, {"transformer_engine.py": ""}
        )
        (tmp_path / "repository" / "requirements-gpu.txt").write_text(f"transformer-engine=={version}\n")
        result = set_up("cpu")
        assert result.returncode == 0, result.stderr
        found = (tmp_path / "repository" / ".venv" / "contract").glob("*.dist-info")
        assert [path.name for path in found] == [f"transformer_engine-{version}.dist-info"]
    assert "transformer_engine" not in installed(tmp_path, ".venv"), "ordinary runs could import it"


@pytest.mark.slow  # the test above has an index with CPU builds, the first one the choice
def test_the_cpu_build_that_pip_finds_wins(tmp_path, indexes, set_up):
    configured, pytorch = indexes
    configured.add_torch("cpu", cuda="13.0")
    configured.add_torch("cpu", "+cpu")
    configured.add_others("9.9")
    pytorch.add_torch("cpu", "+cpu", under="cpu")
    result = set_up("cpu")
    assert result.returncode == 0, result.stderr
    assert versions("cpu", "+cpu").items() <= installed(tmp_path, ".venv").items()
    assert not pytorch.requested


@pytest.mark.slow  # an index that has only that
def test_beside_the_cpu_build_of_torch_a_plain_torchvision_does(tmp_path, indexes, set_up):
    configured, pytorch = indexes
    configured.add_torch("cpu", cuda="13.0")
    configured.add_torch("cpu", "+cpu")
    next((configured.folder / "torchvision").glob("*+cpu*")).unlink()
    configured.add_others("9.9")
    result = set_up("cpu")
    assert result.returncode == 0, result.stderr
    expected = {"torch": versions("cpu", "+cpu")["torch"], "torchvision": versions("cpu", "")["torchvision"]}
    assert expected.items() <= installed(tmp_path, ".venv").items()
    assert "torchvision" in result.stdout and not pytorch.requested


@pytest.mark.slow  # as with CPU builds
def test_the_cuda_build_comes_from_pytorch_where_pip_finds_cpu_builds_alone(tmp_path, indexes, set_up):
    configured, pytorch = indexes
    configured.add_torch("gpu", "+cpu")
    configured.add_torch("gpu", "")  # a build for a CPU with a plain version, as on some platforms
    configured.add_others(versions("gpu", "")["torch"])
    pytorch.add_torch("gpu", "+cu130", cuda="13.0", under="cu130")
    result = set_up("gpu")
    assert result.returncode == 0, result.stderr
    assert versions("gpu", "+cu130").items() <= installed(tmp_path, ".venv-gpu").items()
    others = {"six", "pytest", "sglang", "megappo", "sympy"}
    assert others <= installed(tmp_path, ".venv-gpu").keys(), "torch's own requirements are missing"
    assert pytorch.requested == {"cu130/torch", "cu130/torchvision", "cu130/torchaudio"}
    assert not (tmp_path / "repository" / ".venv").exists()


@pytest.mark.slow  # of the environment for GPUs, which no run on a CPU takes
def test_the_cuda_build_that_pip_finds_wins_over_pytorchs_and_over_a_cpu_build(tmp_path, indexes, set_up):
    configured, pytorch = indexes
    configured.add_torch("gpu", "+cpu")
    configured.add_torch("gpu", cuda="13.0")
    configured.add_others(versions("gpu", "")["torch"])
    pytorch.add_torch("gpu", "+cu130", cuda="13.0", under="cu130")
    result = set_up("gpu")
    assert result.returncode == 0, result.stderr
    assert versions("gpu", "").items() <= installed(tmp_path, ".venv-gpu").items()
    assert not pytorch.requested


@pytest.mark.parametrize("kind, found, folder", [("cpu", "", "cpu"), ("gpu", "+cpu", "cu130")])
def test_without_the_build_the_error_names_it_and_the_indexes(indexes, set_up, kind, found, folder):
    configured, pytorch = indexes
    configured.add_torch(kind, found, cuda=None if found else "13.0")
    configured.add_others("9.9")
    result = set_up(kind)
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    wanted = versions(kind, {"cpu": "+cpu", "cu130": "+cu130"}[folder])["torch"]
    for part in (f"torch {wanted}", f"{pytorch.url}/{folder}", "pip config list", "PYTORCH_INDEX", "PIP_FIND_LINKS"):
        assert part in line
    assert not {"six", "sglang"} & configured.requested, "it went on without torch"


CUDA_FILES = ("cu13/bin/nvcc", "cu13/include/cuda_runtime.h", "cudnn/include/cudnn.h", "nccl/include/nccl.h")
CUDA_FILES += ("cu13/lib/libcudart.so.13",)


def add_cuda(index: Index, files: tuple[str, ...] = CUDA_FILES) -> None:
    """Torch and the rest for CUDA; among it files as NVIDIA's wheels hold them."""
    index.add_torch("gpu", cuda="13.0")
    index.add_others(versions("gpu", "")["torch"])
    make_wheel(index.folder / "six", "six", "1.0", {f"nvidia/{file}": "" for file in files}, executable="nvcc")


def add_transformer_engine(index: Index) -> None:
    """Its two wheels, and the source of the third package, whose build writes its environment into what it makes."""
    for name in ("transformer-engine", "transformer-engine-cu13"):
        make_wheel(index.folder / name, name.replace("-", "_"), "1.0", {})
    folder, name = index.folder / "transformer-engine-torch", "transformer_engine_torch"
    make_wheel(folder / "built", name, "1.0", {})
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    files = {"pyproject.toml": system, "backend.py": TRANSFORMER_ENGINE_BACKEND, "PKG-INFO": "Name: x\nVersion: 1.0\n"}
    wheel = f"{name}-1.0-py3-none-any.whl"
    with tarfile.open(folder / f"{name}-1.0.tar.gz", "w:gz") as archive:
        for path, text in (files | {wheel: (folder / "built" / wheel).read_bytes()}).items():
            data = text if isinstance(text, bytes) else text.encode()
            entry = tarfile.TarInfo(f"{name}-1.0/{path}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def test_transformer_engine_is_built_with_the_headers_of_the_wheels(tmp_path, indexes, set_up):
    add_cuda(indexes[0])
    add_transformer_engine(indexes[0])
    result = set_up(
        "gpu", TRANSFORMER_ENGINE="yes", CPLUS_INCLUDE_PATH="/mine", BUILT_WITH=str(tmp_path / "built_with")
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert {"transformer_engine", "transformer_engine_cu13", "transformer_engine_torch"} <= set(
        installed(tmp_path, ".venv-gpu")
    )
    cuda_home, includes = (tmp_path / "built_with").read_text().splitlines()
    [wheels] = (tmp_path / "repository" / ".venv-gpu").glob("lib/python*/site-packages/nvidia")
    assert cuda_home == f"{wheels}/cu13"
    assert (wheels / "cu13" / "lib64" / "libcudart.so").samefile(wheels / "cu13" / "lib" / "libcudart.so.13")
    stub = subprocess.run(["readelf", "-d", wheels / "cu13" / "lib64" / "stubs" / "libcuda.so"], capture_output=True)
    assert b"[libcuda.so.1]" in stub.stdout
    assert includes.split(":") == ["/mine", *(f"{wheels}/{name}/include" for name in ("cu13", "cudnn", "nccl"))]


@pytest.mark.slow  # of the environment for GPUs, which no run on a CPU takes
def test_a_build_that_fails_ends_the_set_up_unless_transformer_engine_is_not_wanted(tmp_path, indexes, set_up):
    add_cuda(indexes[0])
    failed = set_up("gpu", TRANSFORMER_ENGINE="yes")
    assert failed.returncode == 1
    assert "TransformerEngine was not built" in failed.stderr and "TRANSFORMER_ENGINE=no bash" in failed.stderr
    without = set_up("gpu")
    assert without.returncode == 0 and "leaving out TransformerEngine, as requested" in without.stdout
    assert "megappo" in installed(tmp_path, ".venv-gpu")
    assert set_up("gpu").stdout == ""
    assert set_up("gpu", TRANSFORMER_ENGINE="yes").returncode == 1, "requested now, it must be built"


HEADERS = [pytest.param(f"{name}.h", "CPLUS_", marks=pytest.mark.slow) for name in ("cuda_runtime", "cudnn")]


@pytest.mark.parametrize(
    "lacking, remedy",
    [("nvcc", "CUDA_HOME="), *HEADERS, ("nccl.h", "CPLUS_INCLUDE_PATH=")],
)
def test_what_lacks_to_build_transformer_engine_is_named(indexes, set_up, lacking, remedy):
    add_cuda(indexes[0], tuple(file for file in CUDA_FILES if not file.endswith(lacking)))
    add_transformer_engine(indexes[0])
    result = set_up("gpu", TRANSFORMER_ENGINE="yes")
    assert result.returncode == 1
    first, missing, instead = result.stderr.splitlines()
    assert f"no {lacking} in" in missing and remedy in missing and "TRANSFORMER_ENGINE=no" in instead
    assert "transformer-engine-torch" not in indexes[0].requested, "the build was tried"


def test_a_machine_that_cannot_run_it_is_refused_before_anything_is_installed(tmp_path, indexes, set_up, python):
    commands = tmp_path / "commands"
    commands.mkdir()
    python_13 = f'[[ $2 == *Python.h* || $2 == *"(3, 13)"* ]] && exit 1; exec {python} "$@"'
    fakes = {"getconf": "echo glibc 2.31", "python": python_13}
    for name, text in fakes.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (commands / name).chmod(0o755)
    faults = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "CXX": "no-such-c++",
        "CARGO": "no-such",
        "PYTHON": str(commands / "python"),
    }
    result = set_up("gpu", **faults)
    assert result.returncode == 1
    _, glibc, compiler, header, rust = result.stderr.splitlines()
    assert "expected glibc 2.34 or newer, found 2.31" in glibc and "Ubuntu 22.04" in glibc
    assert "no C++ compiler no-such-c++" in compiler and "apt-get install g++" in compiler and "CXX=" in compiler
    assert "no Python.h for" in header and "apt-get install python3-dev" in header and "PYTHON=" in header
    assert "no wheel of outlines_core for Python 3" in rust and "PYTHON=python3.12" in rust and "cargo" in rust
    assert not indexes[0].requested and not (tmp_path / "repository" / ".venv-gpu").exists()


@pytest.mark.slow
def test_a_network_that_does_not_answer_is_given_up_soon(set_up):
    with socket.create_server(("127.0.0.1", 0)) as configured, socket.create_server(("127.0.0.1", 0)) as pytorch:
        ours, theirs = (f"http://127.0.0.1:{server.getsockname()[1]}" for server in (configured, pytorch))
        before = time.monotonic()
        result = set_up("cpu", PIP_INDEX_URL=ours, PYTORCH_INDEX=theirs)
    assert result.returncode == 1 and f"nor at {theirs}/cpu" in result.stderr
    assert time.monotonic() - before < 60


@pytest.mark.parametrize("name", ["cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-nvrtc"])
def test_cudas_compilers_are_of_the_runtimes_version(name):
    """CCCL's headers, with which SGLang's kernels are compiled at run time, refuse others: "CUDA compiler and CUDA
    toolkit headers are incompatible"."""
    pins = dict(line.split("==") for line in (ROOT / "requirements-gpu.txt").read_text().splitlines() if "==" in line)
    assert pins[f"nvidia-{name}"].split(".")[:2] == pins["nvidia-cuda-runtime"].split(".")[:2]
