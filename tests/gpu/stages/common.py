"""Shared code of the stages; imported first, since it makes megatron-core usable."""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

REPOSITORY = Path(__file__).parents[3]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "support")]
if "RANK" not in os.environ:  # ranks of spawn.py have it
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

if importlib.util.find_spec("tensorboard") is None:  # which no stage writes
    sys.modules["torch.utils.tensorboard"] = SimpleNamespace(SummaryWriter=None)

from megappo.runtime import megatron_setup, platform  # noqa: E402

megatron_setup.install()

from megappo.placement.groups import ComponentGroups, build_groups  # noqa: E402
from megappo.placement.layout import Layout  # noqa: E402

CUDA = platform.has_cuda()
DEVICE = platform.device()
GIB = 2**30
REPEATS = 5 if CUDA else 0
T = TypeVar("T")


def sized(cuda: T, cpu: T) -> T:
    """Return the sizes for this machine: full ones with CUDA, tiny ones of the same computation without it."""
    return cuda if CUDA else cpu


def report(measure: Callable[[], dict[str, Any]]) -> None:
    """Print the results of a stage as one JSON object; a failure ends it with a traceback and exit code 1."""
    with contextlib.redirect_stdout(sys.stderr):
        found = measure()
    machine = {"device": torch.cuda.get_device_name(DEVICE) if CUDA else "cpu", "torch": torch.__version__}
    print(json.dumps(machine | found, indent=1))


@contextlib.contextmanager
def one_rank() -> Iterator[ComponentGroups]:
    """A component's groups in a world of this process alone."""
    dist.init_process_group(platform.backend(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield build_groups({"actor": Layout((0,))}, seed=0)["actor"]
    finally:
        dist.destroy_process_group()


def measured(compute: Callable[[], T], repeats: int = REPEATS) -> tuple[T, dict[str, float]]:
    """Return the result of `compute` and its measurements.

    `peak_gib` is the GPU memory that the first call took on top of what was allocated; `seconds` the median of the
    `repeats` calls after it, or the first call's time if there are none.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated() if CUDA else 0
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    result, first = timed(compute)
    peak = {"peak_gib": (torch.cuda.max_memory_allocated() - before) / GIB} if CUDA else {}
    seconds = [timed(compute)[1] for _ in range(repeats)] or [first]
    return result, {"seconds": statistics.median(seconds), **peak}


def timed(compute: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `compute` and the seconds until the GPU was done."""
    start = time.perf_counter()
    result = compute()
    torch.cuda.synchronize()
    return result, time.perf_counter() - start


class OtherProcess:
    """A process on the same GPU, in which a function of a module answers one call after another."""

    def __init__(self, answer: Callable[[Any], Any]):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(answer, theirs), daemon=True)
        self.process.start()

    def ask(self, call: Any) -> Any:
        self.connection.send((call,))
        answer, error = self.connection.recv()
        assert error is None, error
        return answer

    def end(self) -> None:
        self.connection.send(None)
        self.process.join()


def _serve(answer: Callable[[Any], Any], connection: Connection) -> None:
    while (call := connection.recv()) is not None:
        try:
            connection.send((answer(*call), None))
        except Exception:
            connection.send((None, traceback.format_exc()))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names and bits."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(_bytes(found[name]), _bytes(tensor)), name


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def num_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
