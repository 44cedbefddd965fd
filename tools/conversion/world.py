"""Processes of a conversion: one, or all that torchrun has started."""

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from math import lcm
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.architecture.architecture import DTYPES, Architecture
from megappo.architecture.fit import fit_errors
from megappo.batch.exchange import Exchange, OtherRankError
from megappo.config.schema import Model
from megappo.config.sections import Parallel
from megappo.models.gpt import ModelChunks, build_model
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.runtime import platform
from megappo.runtime.heartbeat import heartbeat
from megappo.weights.hf_folder import staged, temporary_folder

ENDING = (signal.SIGINT, signal.SIGTERM)
_M_MMAP_THRESHOLD = -3  # of malloc.h


class UsageError(Exception):
    """Raised for a command that cannot work with its arguments."""


def parallel_of(args: argparse.Namespace) -> Parallel:
    """Return the layout given on the command line.

    Sequence parallelism is on for tensor-parallel ranks because a mixture-of-experts model requires it; a conversion
    computes nothing that it would change.

    Raises:
        UsageError: a size below 1, or not as many sizes of stages as there are stages.
    """
    sizes = {name: getattr(args, name) for name in ("tensor", "pipeline", "expert")}
    split = args.pipeline_split
    for name, size in [*sizes.items(), *(("pipeline-split", size) for size in split or ())]:
        if size < 1:
            raise UsageError(f"--{name}: {size} is not 1 or more")
    if split is not None and len(split) != args.pipeline:
        raise UsageError(
            f"--pipeline-split {','.join(map(str, split))} names {len(split)} stages, --pipeline {args.pipeline}: "
            "give the layers of every stage"
        )
    return Parallel(**sizes, pipeline_split=split, sequence=args.tensor > 1)


def _flag(dimension: str) -> str:
    """Return the command-line option of a layout's dimension."""
    return f"--{dimension.replace('_', '-')}"


def _return_freed_memory() -> None:
    """Make glibc map every tensor of 1 MiB or more separately.

    By default it places tensors of up to 32 MiB side by side on the heap, where memory freed between others stays with
    the process: buckets of changing sizes then take several times their memory.
    """
    allocator = ctypes.CDLL(None)
    if hasattr(allocator, "mallopt"):
        allocator.mallopt(_M_MMAP_THRESHOLD, 2**20)


def _check_size(parallel: Parallel, size: int) -> None:
    """Require exactly as many processes as there are distinct shards: experts may need more than the other weights."""
    needed = parallel.pipeline * lcm(parallel.tensor, parallel.expert)
    if size != needed:
        experts = f" with --expert {parallel.expert}" if parallel.expert > 1 else ""
        raise UsageError(
            f"--tensor {parallel.tensor} x --pipeline {parallel.pipeline}{experts} needs {needed} processes, this run "
            f"has {size}: start it with torchrun's --nproc-per-node {needed}, or without torchrun"
        )


class World:
    """This process among the conversion's processes, and the layout they hold the model in.

    Attributes:
        writing: True once writing the output has begun; an earlier failure is the input's fault.
        reports_errors: True if this rank prints the error message.
    Raises:
        UsageError: the layout needs another number of processes.
    """

    def __init__(self, parallel: Parallel):
        _return_freed_memory()
        size = int(os.environ.get("WORLD_SIZE", "1"))
        _check_size(parallel, size)
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(platform.backend())
        else:
            dist.init_process_group(platform.backend(), store=dist.HashStore(), rank=0, world_size=1)
        self.rank = dist.get_rank()
        self.parallel = parallel
        layout = Layout(tuple(range(size)), tensor=parallel.tensor, pipeline=parallel.pipeline, expert=parallel.expert)
        self.groups = build_groups({"model": layout}, seed=0)["model"]
        self.exchange = Exchange(dist.group.WORLD)
        self.writing = False
        self.reports_errors = self.rank == 0

    def build(self, architecture: Architecture, dtype: str) -> ModelChunks:
        """Build this rank's shard of the model, with uninitialized weights."""
        errors = list(fit_errors(architecture, self.parallel, _flag))
        if errors:
            raise UsageError("; ".join(errors))
        model = Model(path=".", dtype=dtype, layer_spec="torch")  # nothing reads the path
        return build_model(architecture, model, self.parallel, self.groups, recompute="none", trained=False)

    def together(self, action: Callable[[], object]) -> None:
        """Run an action on every rank; if one fails, all raise, and the first that failed reports the error."""
        error = None
        try:
            action()
        except Exception as failure:
            error = failure
        failed = [rank for rank, has_failed in enumerate(self.exchange.all_gather(error is not None)) if has_failed]
        if failed:
            self.reports_errors = self.rank == failed[0]
            raise error or OtherRankError(f"rank {failed[0]} failed")

    @contextlib.contextmanager
    def staged(self, target: Path) -> Iterator[Path]:
        """Apply `staged` on all ranks: the folder moves into place when all of them have written.

        The first rank creates and moves it. If that rank is killed, another one removes the partial output.
        """
        self.writing = True
        temporary = temporary_folder(target)
        with contextlib.ExitStack() as stack:
            self.together(lambda: stack.enter_context(staged(target)) if self.rank == 0 else None)
            if self.rank > 0:
                stack.enter_context(_removed_on_failure(temporary))
            yield temporary
            if self.rank > 0:  # once the first rank has gone on, its folder must not be removed
                signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            dist.barrier()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def log(self, line: str) -> None:
        """Print a line on the first rank."""
        if self.rank == 0:
            print(line, flush=True)

    @contextlib.contextmanager
    def bar(self, what: str, total: int, unit: str) -> Iterator["Bar"]:
        """Show a part of the conversion and its progress, on the first rank."""
        heartbeat.enter(what)
        yield Bar(total, unit)


class Bar:
    """Progress of a part of a conversion."""

    def __init__(self, total: int, unit: str):
        self._done, self._total, self._unit = 0, total, unit

    def update(self, count: int = 1) -> None:
        """Note that `count` more are done."""
        self._done += count
        heartbeat.count(self._done, self._total, self._unit)


@contextlib.contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def described(shapes: dict[str, tuple[int, ...]], dtype: str) -> str:
    """Return the numbers of tensors, parameters and bytes in words."""
    elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    size = elements * DTYPES[dtype].nbytes
    amount, unit = (size / 2**30, "GiB") if size >= 2**30 else (size / 2**20, "MiB")
    return f"{len(shapes)} tensors, {elements:,} parameters, {amount:.2f} {unit} in {dtype}"
