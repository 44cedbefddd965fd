"""The repository's tools, run as a user runs them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).parents[2]
CONVERT, INSPECT = REPOSITORY / "tools" / "convert.py", REPOSITORY / "tools" / "inspect_checkpoint.py"
Result = subprocess.CompletedProcess[str]


def run(tool: Path, *arguments: object, ranks: int = 1, before: Callable[[], None] | None = None) -> Result:
    """A tool's run, under torchrun when it takes several ranks."""
    torchrun = ["-m", "megappo.torchrun", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *torchrun, tool, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=before,
    )


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def convert(command: str, source: Path, target: Path, *arguments: object, ranks: int = 1) -> str:
    """Standard output of a conversion that must go well."""
    done = run(CONVERT, command, "--input", source, "--output", target, *arguments, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", done.stderr
    return done.stdout


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
