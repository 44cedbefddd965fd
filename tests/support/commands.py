"""Run the repository's tools as a user does."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from ports import free_port
from safetensors.torch import load_file
from spawn import START_METHOD

REPOSITORY = Path(__file__).parents[2]
CONVERT, INSPECT = REPOSITORY / "tools" / "convert.py", REPOSITORY / "tools" / "inspect_checkpoint.py"
TIMEOUT_SECONDS = 240
Result = subprocess.CompletedProcess[str]


def run(
    tool: Path,
    *arguments: object,
    ranks: int = 1,
    torchrun: bool = False,
    launched: bool = False,
    before: Callable[[], None] | None = None,
) -> Result:
    """Run a tool.

    With `torchrun`, or with `before`, which is called in the tool's process first, the tool is a new command.
    Otherwise it is forked from a process that has already imported megatron-core, which saves seconds.
    megappo.torchrun starts several ranks, and with `launched` a single one, too.
    """
    if not torchrun and not launched and before is None:
        return _run_in_forks(tool, list(map(str, arguments)), ranks)
    launcher = ["-m", "megappo.torchrun", "--nproc-per-node", str(ranks)] if ranks > 1 or launched else []
    return subprocess.run(
        [sys.executable, *launcher, tool, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        preexec_fn=before,
    )


def _run_in_forks(tool: Path, arguments: list[str], num_ranks: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        context, port = multiprocessing.get_context(START_METHOD), free_port()
        ranks = [
            context.Process(target=_main, args=(tool, arguments, outputs, rank, num_ranks, port))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        try:
            code = _code_of(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return Result([tool, *arguments], code, *(output.read_text() for output in outputs))


def _code_of(ranks: list[BaseProcess]) -> int:
    """Return 0 if all ranks succeeded, else the code of a failed one: like torchrun, without waiting for the others."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while running := [process for process in ranks if process.exitcode is None]:
        assert wait([process.sentinel for process in running], deadline - time.monotonic()), "it did not end"
        if failed := [process.exitcode for process in ranks if process.exitcode]:
            return failed[0]
    return next((process.exitcode for process in ranks if process.exitcode), 0)  # it may have ended since


def _main(tool: Path, arguments: list[str], outputs: list[Path], rank: int, num_ranks: int, port: int) -> None:
    for number, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(1)
    if num_ranks > 1:  # as torchrun sets them
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))
    sys.argv, sys.path[:0] = [str(tool), *arguments], [str(tool.parent)]  # as `python TOOL ARGUMENTS` has them
    runpy.run_path(str(tool), run_name="__main__")


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def convert(
    command: str, source: Path, target: Path, *arguments: object, ranks: int = 1, torchrun: bool = False
) -> str:
    """Return the standard output of a conversion that must succeed."""
    done = run(CONVERT, command, "--input", source, "--output", target, *arguments, ranks=ranks, torchrun=torchrun)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", done.stderr
    return done.stdout


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that two sets of tensors have the same names, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder with their contents."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
