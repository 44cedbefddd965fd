"""The repository's tools, run as a user runs them."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from spawn import START_METHOD

REPOSITORY = Path(__file__).parents[2]
CONVERT, INSPECT = REPOSITORY / "tools" / "convert.py", REPOSITORY / "tools" / "inspect_checkpoint.py"
Result = subprocess.CompletedProcess[str]


def run(tool: Path, *arguments: object, ranks: int = 1, before: Callable[[], None] | None = None) -> Result:
    """A tool's run, under torchrun when it takes several ranks."""
    if ranks == 1 and before is None:
        return run_in_fork(tool, *map(str, arguments))
    torchrun = ["-m", "megappo.torchrun", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *torchrun, tool, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=before,
    )


def run_in_fork(tool: Path, *arguments: str) -> Result:
    """A tool's run in a process that has imported megatron-core already, as tests' ranks have: it saves seconds."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = multiprocessing.get_context(START_METHOD).Process(target=_main, args=(tool, arguments, outputs))
        process.start()
        try:
            process.join(240)
            assert process.exitcode is not None, f"{tool} did not end"
        finally:
            process.kill()
            process.join()
        return Result([tool, *arguments], process.exitcode, *(output.read_text() for output in outputs))


def _main(tool: Path, arguments: list[str], outputs: list[Path]) -> None:
    for number, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    torch.set_num_threads(1)
    sys.argv, sys.path[:0] = [str(tool), *arguments], [str(tool.parent)]  # as `python TOOL ARGUMENTS` has them
    runpy.run_path(str(tool), run_name="__main__")


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


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
