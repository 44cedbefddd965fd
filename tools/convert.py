"""Convert weights between Hugging Face folders and Megatron's dist_checkpointing folders, compare, and reshard them.

    .venv/bin/python tools/convert.py COMMAND ..., one of
    hf-to-megatron --input HF_FOLDER --output FOLDER
    megatron-to-hf --input RUN/checkpoints/step_X/actor --hf-config HF_FOLDER --output FOLDER
    verify         --input FOLDER --output FOLDER
    reshard        --input RUN/checkpoints/step_X --hf-config HF_FOLDER --output FOLDER

Works on the CPU, in one process. A model too large for that: --tensor T --pipeline P --expert E, under
.venv/bin/python -m megappo.torchrun --nproc-per-node N tools/convert.py ...
with N = P x (least common multiple of T and E)
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the machine's memory is larger, and its GPUs may be training

from megappo.runtime import megatron_setup

megatron_setup.install()  # must come before the first import of megatron.core

import torch.distributed as dist  # noqa: E402
from conversion.commands import hf_to_megatron, megatron_to_hf, reshard_folder  # noqa: E402
from conversion.verify import verify  # noqa: E402
from conversion.world import ENDING, UsageError, World, parallel_of  # noqa: E402

from megappo.checkpoint.checksums import refuse_damaged  # noqa: E402
from megappo.checkpoint.folders import no_folder  # noqa: E402
from megappo.errors import ActionableError  # noqa: E402
from megappo.runtime.failure import LOST_RANK  # noqa: E402

COMMANDS = {
    "hf-to-megatron": (hf_to_megatron, "a Hugging Face folder to a Megatron folder, which loads in any layout"),
    "megatron-to-hf": (megatron_to_hf, "a Megatron folder, or step_X/actor, step_X/critic, to a Hugging Face folder"),
    "verify": (
        verify,
        "compare two folders to the bit, Hugging Face's or Megatron's; a Megatron one is loaded to be compared with a "
        "Hugging Face one, and two of them are read side by side, a few MiB at a time",
    ),
    "reshard": (
        reshard_folder,
        "rewrite a Megatron folder, or a whole step_X with its optimizer states, in files cut for another layout. "
        "Checkpoints load in any layout as they are: this only spares every rank reading parts of many files",
    ),
}
WITH_HF_CONFIG = ("megatron-to-hf", "verify", "reshard")
WITH_DTYPE = {
    "hf-to-megatron": "of the result; default: the input's",
    "megatron-to-hf": "of the result; default: the input's",
    "verify": "cast the tensors of --input to it before they are compared",
}
WITH_VALUE_MODEL = {
    "hf-to-megatron": "a critic: the value head of a reward model, or a new one, in place of the language model's",
    "megatron-to-hf": "of a policy with a value head besides, write the critic; a critic's folder needs no flag",
}
# It logs what it raises as well, from every process that writes.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.CRITICAL)
PATIENCE_SECONDS = 30.0


class Interrupted(BaseException):
    """Raised by SIGINT and SIGTERM."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: success; 1: it failed or found differences; 2: the command line or the input is at fault.
    """
    args = _parser().parse_args(arguments)
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
        if args.command != "verify":
            _check_output(args.input, args.output, args.force)
        world = World(parallel_of(args))
        for folder in (args.input, args.output) if args.command == "verify" else (args.input,):
            refuse_damaged(folder, world.exchange)
        return COMMANDS[args.command][0](args, world) or 0
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


def _check_output(source: Path, output: Path, force: bool) -> None:
    if not source.is_dir():
        raise UsageError(f"--input: {no_folder(source)}")
    inner, outer = source.resolve(), output.resolve()
    if outer == inner or outer in inner.parents or inner in outer.parents:
        raise UsageError(f"--output {output} and --input {source} lie in each other: name another folder to write to")
    if output.is_dir() and any(output.iterdir()) and not force:
        raise UsageError(f"--output {output} is not empty: --force replaces it, when the conversion has gone well")


def _end_on_signals() -> None:
    """Have Ctrl-C and SIGTERM end the conversion as an error does, with partial output removed."""

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, description) in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        command.add_argument("--input", type=Path, required=True, metavar="DIR", help="the folder to read")
        output = "the folder to compare with" if name == "verify" else "the folder to write"
        command.add_argument("--output", type=Path, required=True, metavar="DIR", help=output)
        command.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks (default 1)")
        command.add_argument("--pipeline", type=int, default=1, help="pipeline stages (default 1)")
        command.add_argument("--expert", type=int, default=1, help="ranks that share out the experts (default 1)")
        command.add_argument(
            "--pipeline-split",
            type=layers,
            metavar="L,L",
            help="layers of each stage, as 13,15 (default: equal)",
        )
        if name != "verify":
            command.add_argument("--force", action="store_true", help="replace an output folder that is not empty")
        if name in WITH_HF_CONFIG:
            command.add_argument(
                "--hf-config", type=Path, metavar="DIR", help="the model's config.json and tokenizer, if not in --input"
            )
        if name in WITH_DTYPE:
            command.add_argument("--dtype", choices=("fp32", "bf16"), help=WITH_DTYPE[name])
        if name in WITH_VALUE_MODEL:
            command.add_argument("--value-model", action="store_true", help=WITH_VALUE_MODEL[name])
    return parser


def layers(text: str) -> tuple[int, ...]:
    """Parse numbers of layers, as 13,15."""
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the process groups can abort an interpreter that ends its own way
