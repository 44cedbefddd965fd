"""Convert weights between Hugging Face folders and Megatron's dist_checkpointing folders, compare, and reshard them.

    megappo convert COMMAND ..., one of
    hf-to-megatron --input HF_FOLDER --output FOLDER
    megatron-to-hf --input RUN/checkpoints/step_X/actor --hf-config HF_FOLDER --output FOLDER
    verify         --input FOLDER --output FOLDER
    reshard        --input RUN/checkpoints/step_X --hf-config HF_FOLDER --output FOLDER

Works on the CPU, in one process. For a model too large for that, --tensor T --pipeline P --expert E start
P x (least common multiple of T and E) processes.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from math import lcm
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.config.hub import cached_model
from megappo.runtime.machine import PYTHON, SET_BY_TORCHRUN, for_python
from megappo.runtime.status import STATUS
from megappo.table import resolved

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the machine's memory is larger, and its GPUs may be training
MODULE, EXECUTE = "megappo_tools.convert", "megappo_tools.conversion.running:execute"
FAULT = "megappo_tools.conversion.output_folder:folder_fault"
COMMANDS = {
    "hf-to-megatron": ("a Hugging Face folder to a Megatron folder, which loads in any layout"),
    "megatron-to-hf": ("a Megatron folder, or step_X/actor, step_X/critic, to a Hugging Face folder"),
    "verify": (
        "compare two folders to the bit, Hugging Face's or Megatron's; a Megatron one is loaded to be compared with a "
        "Hugging Face one, and two of them are read side by side, a few MiB at a time"
    ),
    "reshard": (
        "rewrite a Megatron folder, or a whole step_X with its optimizer states, in files cut for another layout. "
        "Checkpoints load in any layout as they are: this only spares every rank reading parts of many files"
    ),
}
MEGATRON_LM = "write OUTPUT/release and latest_checkpointed_iteration.txt, which --load of Megatron-LM and slime takes"
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: success; 1: it failed or found differences; 2: the command line or the input is at fault.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    args = _parser().parse_args(words)
    _forget_other_launchers()
    fault = None if "WORLD_SIZE" in os.environ else resolved(FAULT)(args)
    if fault:  # before the slow imports
        print(f"error: {fault}", file=sys.stderr)
        return 2
    num_processes = args.pipeline * lcm(args.tensor, args.expert)
    if num_processes > 1 and "WORLD_SIZE" not in os.environ:
        launcher = ["-m", "megappo.torchrun", "--standalone", "--nproc-per-node", str(num_processes)]
        os.execve(sys.executable, [*PYTHON, *launcher, "-m", MODULE, *words], for_python(os.environ))
    if os.environ.get("RANK", "0") == "0":
        STATUS.start("imports")
    try:
        return resolved(EXECUTE)(args)
    finally:
        STATUS.stop()


def _forget_other_launchers() -> None:
    """Remove torchrun's variables unless all are there: a cluster sets some of them for a process that is no rank."""
    if not all(name in os.environ for name in SET_BY_TORCHRUN):
        for name in SET_BY_TORCHRUN:
            os.environ.pop(name, None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megappo convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, description in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        command.add_argument("--input", type=_model, required=True, metavar="DIR", help="the folder to read")
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
                "--hf-config",
                type=_model,
                metavar="DIR",
                help="the model's config and tokenizer, if not in --input",
            )
        if name in WITH_DTYPE:
            command.add_argument("--dtype", choices=("fp32", "bf16"), help=WITH_DTYPE[name])
        if name == "hf-to-megatron":
            command.add_argument("--megatron-lm", action="store_true", help=MEGATRON_LM)
        if name in WITH_VALUE_MODEL:
            command.add_argument("--value-model", action="store_true", help=WITH_VALUE_MODEL[name])
    return parser


def _model(text: str) -> Path:
    return Path(cached_model(text))


def layers(text: str) -> tuple[int, ...]:
    """Parse numbers of layers, as 13,15."""
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the process groups can abort an interpreter that ends its own way
