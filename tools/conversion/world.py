"""The processes a conversion runs in: one, or those torchrun has started."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from megappo import platform
from megappo.config.schema import Model, Parallel
from megappo.models.build import ModelChunks, build_model
from megappo.models.hf_config import DTYPES, HeadKind
from megappo.placement.exchange import Exchange, OtherRankError
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.weights.staging import staged, temporary_folder

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SAFETENSORS_DTYPES = {"F32": "fp32", "BF16": "bf16"}


class UsageError(Exception):
    """A command that cannot work as it was given."""


class World:
    """This process among those of the conversion, and the layout they hold the model in.

    Attributes:
        writing: whether the output has been begun: what fails before is the input's fault.
        speaks: whether this rank says what went wrong.
    Raises:
        UsageError: the layout needs another number of processes.
    """

    def __init__(self, tensor: int, pipeline: int):
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size != tensor * pipeline:
            raise UsageError(
                f"--tensor {tensor} x --pipeline {pipeline} needs {tensor * pipeline} processes, this run has {size}: "
                f"start it with python -m megappo.torchrun --nproc-per-node {tensor * pipeline} tools/convert.py ..."
            )
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(platform.backend())
        else:
            dist.init_process_group(platform.backend(), store=dist.HashStore(), rank=0, world_size=1)
        self.rank = dist.get_rank()
        self.parallel = Parallel(tensor=tensor, pipeline=pipeline)
        layout = Layout(tuple(range(size)), tensor=tensor, pipeline=pipeline)
        self.groups = build_groups({"model": layout}, seed=0)["model"]
        self.exchange = Exchange(dist.group.WORLD)
        self.writing = False
        self.speaks = self.rank == 0

    def build(self, hf_config: dict, dtype: str, head: HeadKind) -> ModelChunks:
        """This rank's part of the model, its weights not set."""
        model = Model(path="", dtype=dtype, layer_spec="torch")
        return build_model(hf_config, model, self.parallel, self.groups, head=head, recompute="none", trained=False)

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
        """`staged` for all ranks: the folder takes its place when all of them have written."""
        self.writing = True
        with contextlib.ExitStack() as stack:
            self.together(lambda: stack.enter_context(staged(target)) if self.rank == 0 else None)
            yield temporary_folder(target)
            dist.barrier()

    def say(self, line: str) -> None:
        """A line of the report, once."""
        if self.rank == 0:
            print(line, flush=True)

    def bar(self, what: str, total: int, unit: str) -> tqdm:
        """A progress bar on standard error, if that is a terminal."""
        hidden = self.rank != 0 or not sys.stderr.isatty()
        return tqdm(total=total, desc=what, unit=unit, unit_scale=True, disable=hidden, leave=False, file=sys.stderr)


def described(shapes: dict[str, tuple[int, ...]], dtype: str) -> str:
    """How many tensors, parameters and bytes."""
    elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    size = elements * DTYPES[dtype].itemsize
    amount, unit = (size / 2**30, "GiB") if size >= 2**30 else (size / 2**20, "MiB")
    return f"{len(shapes)} tensors, {elements:,} parameters, {amount:.2f} {unit} in {dtype}"
