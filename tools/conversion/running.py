"""A conversion in this process: its errors, signals and exit code."""

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from megappo.runtime import megatron_setup

megatron_setup.install()  # must come before the first import of megatron.core

import torch.distributed as dist  # noqa: E402

from megappo.architecture.model_folder import newest_iteration  # noqa: E402
from megappo.checkpoint.checksums import refuse_damaged  # noqa: E402
from megappo.errors import ActionableError  # noqa: E402
from megappo.runtime.failure import LOST_RANK  # noqa: E402
from megappo_tools.conversion.commands import hf_to_megatron, megatron_to_hf, reshard_folder  # noqa: E402
from megappo_tools.conversion.output_folder import folder_fault  # noqa: E402
from megappo_tools.conversion.verify import verify  # noqa: E402
from megappo_tools.conversion.world import ENDING, UsageError, World, parallel_of  # noqa: E402

COMMANDS = {
    "hf-to-megatron": hf_to_megatron,
    "megatron-to-hf": megatron_to_hf,
    "verify": verify,
    "reshard": reshard_folder,
}
# It logs what it raises as well, from every process that writes.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)
PATIENCE_SECONDS = 30.0


class Interrupted(BaseException):
    """Raised by SIGINT and SIGTERM."""


def execute(args: argparse.Namespace) -> int:
    """Run a command and return its exit code, as `megappo convert` does."""
    code = 1
    with contextlib.suppress(Interrupted):  # one that arrives while an error is reported
        _end_on_signals()
        try:
            code = _run(args)
        finally:
            _ignore_signals()  # torchrun's, too: an exception while Python shuts down would be a message of its own
            if dist.is_initialized():
                dist.destroy_process_group()
    return code


def _run(args: argparse.Namespace) -> int:
    world = None
    try:
        args.input = newest_iteration(args.input)
        if args.command == "verify":
            args.output = newest_iteration(args.output)
        if fault := folder_fault(args):
            raise UsageError(fault)
        world = World(parallel_of(args))
        for folder in (args.input, args.output) if args.command == "verify" else (args.input,):
            refuse_damaged(folder, world.exchange)
        return COMMANDS[args.command](args, world) or 0
    except Interrupted:
        _ended("interrupted", args, world)
        return 1
    except (UsageError, ActionableError, OSError, ValueError) as error:
        return _failed(str(error), args, world)
    except RuntimeError as error:
        if any(sign in str(error) for sign in LOST_RANK):
            return _ended("another rank has ended", args, world)
        raise


def _failed(message: str, args: argparse.Namespace, world: World | None) -> int:
    """Report an error once over all ranks and return the exit code."""
    writing = world is not None and world.writing
    if not (world.reports_errors if world else os.environ.get("RANK", "0") == "0"):
        _wait_for_report()
    kept = f"; {args.output} is as it was before" if writing else ""
    print(f"error: {message}{kept}", file=sys.stderr, flush=True)
    return 1 if writing else 2


def _wait_for_report() -> None:
    """Wait for torchrun to end this rank, so that the failed rank can report the error.

    If this rank exited by itself, torchrun would end the others, maybe before the report. Returns after a timeout, when
    no rank has exited and so none has reported anything.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    time.sleep(PATIENCE_SECONDS)


def _ended(why: str, args: argparse.Namespace, world: World | None) -> int:
    """Report that a signal or another rank ended the conversion.

    With several ranks, torchrun or the rank that failed first reports the cause; only the output's state is added.
    """
    if "WORLD_SIZE" not in os.environ:
        return _failed(why, args, world)
    if world and world.writing and world.rank == 0:
        print(f"{args.output} is as it was before", file=sys.stderr, flush=True)
    return 1


def _end_on_signals() -> None:
    """Make Ctrl-C and SIGTERM end the conversion as an error does, with partial output removed."""

    def end(number: int, frame: FrameType | None) -> None:
        _ignore_signals()
        raise Interrupted

    def ignored(unraisable: Any) -> None:  # raised in a destructor, where it goes no further
        if isinstance(unraisable.exc_value, Interrupted):
            signal.signal(signal.SIGALRM, end)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        else:
            sys.__unraisablehook__(unraisable)

    for number in ENDING:
        signal.signal(number, end)
    sys.unraisablehook = ignored


def _ignore_signals() -> None:
    for number in (*ENDING, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
