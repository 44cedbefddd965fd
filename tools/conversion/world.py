"""The processes a conversion runs in: one, or those torchrun has started."""

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from math import lcm
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from megappo.architecture.architecture import Architecture
from megappo.architecture.dtypes import DTYPES
from megappo.architecture.fit import fit_errors
from megappo.batch.exchange import Exchange, OtherRankError
from megappo.config.schema import Model, Parallel
from megappo.models.gpt import ModelChunks, build_model
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.runtime import platform
from megappo.weights.hf_folder import staged, temporary_folder

ENDING = (signal.SIGINT, signal.SIGTERM)
_M_MMAP_THRESHOLD = -3  # of malloc.h


class UsageError(Exception):
    """A command that cannot work as it was given."""


def parallel_of(args: argparse.Namespace) -> Parallel:
    """The layout of the command line. A mixture of experts demands sequence parallelism of tensor-parallel ranks; where
    nothing is computed, it makes no difference.

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
    """What a dimension of a layout is called on the command line."""
    return f"--{dimension.replace('_', '-')}"


def _return_freed_memory() -> None:
    """Have glibc map every tensor of a MiB or more apart. It would put those of up to 32 MiB side by side, and what is
    freed between others would stay with the process: buckets of changing sizes then take several times their memory."""
    allocator = ctypes.CDLL(None)
    if hasattr(allocator, "mallopt"):
        allocator.mallopt(_M_MMAP_THRESHOLD, 2**20)


def _check_size(parallel: Parallel, size: int) -> None:
    """As few processes as can hold the model, each its own part of it: the experts may need more than the rest."""
    needed = parallel.pipeline * lcm(parallel.tensor, parallel.expert)
    if size != needed:
        experts = f" with --expert {parallel.expert}" if parallel.expert > 1 else ""
        raise UsageError(
            f"--tensor {parallel.tensor} x --pipeline {parallel.pipeline}{experts} needs {needed} processes, this run "
            f"has {size}: start it with .venv/bin/python -m megappo.torchrun --nproc-per-node {needed} "
            f"{sys.argv[0]} ..."
        )


class World:
    """This process among those of the conversion, and the layout they hold the model in.

    Attributes:
        writing: whether the output has been begun: what fails before is the input's fault.
        speaks: whether this rank says what went wrong.
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
        self.speaks = self.rank == 0

    def build(self, architecture: Architecture, dtype: str) -> ModelChunks:
        """This rank's part of the model, its weights not set."""
        errors = list(fit_errors(architecture, self.parallel, _flag))
        if errors:
            raise UsageError("; ".join(errors))
        model = Model(path=".", dtype=dtype, layer_spec="torch")  # nothing reads the path
        return build_model(architecture, model, self.parallel, self.groups, recompute="none", trained=False)

    def together(self, action: Callable[[], object]) -> None:
        """Do it on every rank; where one fails, all do, and the first that failed says why."""
        error = None
        try:
            action()
        except Exception as failure:
            error = failure
        failed = [rank for rank, has_failed in enumerate(self.exchange.share(error is not None)) if has_failed]
        if failed:
            self.speaks = self.rank == failed[0]
            raise error or OtherRankError(f"rank {failed[0]} failed")

    @contextlib.contextmanager
    def staged(self, target: Path) -> Iterator[Path]:
        """`staged` for all ranks: the folder takes its place when all of them have written.

        The first rank makes it and puts it there. When it is killed, another one removes what is half written.
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

    def say(self, line: str) -> None:
        """A line of the report, once."""
        if self.rank == 0:
            print(line, flush=True)

    def bar(self, what: str, total: int, unit: str) -> tqdm:
        """A progress bar on standard error, if that is a terminal."""
        hidden = self.rank != 0 or not sys.stderr.isatty()
        return tqdm(total=total, desc=what, unit=unit, unit_scale=True, disable=hidden, leave=False, file=sys.stderr)


@contextlib.contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def described(shapes: dict[str, tuple[int, ...]], dtype: str) -> str:
    """How many tensors, parameters and bytes."""
    elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    size = elements * DTYPES[dtype].nbytes
    amount, unit = (size / 2**30, "GiB") if size >= 2**30 else (size / 2**20, "MiB")
    return f"{len(shapes)} tensors, {elements:,} parameters, {amount:.2f} {unit} in {dtype}"
