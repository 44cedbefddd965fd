"""Command lines of the commands. They import nothing heavy: a wrong command line ends at once."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from megappo.runtime.gpus import GPUS, GPUS_PER_NODE

MOST_RANKS = 100_000
"""Ranks of a run."""
CHECKS = ("packages", "megatron", "gpus", "collectives", "attention", "engine", "limits")
"""Checks of the doctor, in their order."""
PLAN = """\
examples:
  megappo plan configs/quickstart.yaml trainer.seed=1
  megappo plan configs/qwen2.5_7b_gsm8k_8gpu.yaml --gpu h100 --suggest
  megappo plan --init Qwen/Qwen2.5-7B --gpu h100 --gpus 8 > my_run.yaml
  megappo plan --keys actor.optim

The exit code is 0 if the run could start here, else 2. A model or data that is missing is an error, unless
--ignore-missing is given or a run downloads the model. --gpu estimates without them."""
TRAIN = """\
example: megappo train configs/quickstart.yaml trainer.output_dir=outputs/mine actor.optim.lr=1e-6
all keys: megappo plan --keys. Several nodes: launch/torchrun_node.sh, launch/slurm.sbatch."""
SFT = """\
example: megappo sft my_sft.yaml trainer.output_dir=outputs/sft actor.optim.lr=1e-5
It is megappo train with trainer.kind=sft: docs/sft.md."""
REWARD_MODEL = """\
example: megappo reward-model my_preferences.yaml trainer.output_dir=outputs/rm reward_model.optim.lr=1e-5
It is megappo train with trainer.kind=reward_model: docs/reward_models.md."""
EVALUATE = """\
CHECKPOINT is a run's folder (its newest checkpoint), one of its checkpoints (step_XXXXXXXX), or a Hugging Face folder.
CONFIG sets the held-out data (data.val_files, eval.datasets), the sampling and the ranks. Engines are started, nothing
is trained, and the run does not change. evaluations/NAME gets metrics.jsonl, evaluation.json, rollouts/ and
report.html. They replace the previous evaluation's files, whose metrics are kept under a name with the date.

example: megappo evaluate outputs/quickstart/run rollout.val_n=4 rollout.val_temperature=1"""
INSPECT = """\
examples:
  megappo inspect outputs/quickstart/run           names, shapes and dtypes, read without loading them
  megappo inspect configs/quickstart.yaml --show 1 prompts as the model gets them, lengths, labels"""
SERVE = "usage: megappo serve MODEL [SGLang's arguments; megappo serve MODEL --help lists them]"


def plan_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of `megappo plan`."""
    parser = _parser("plan", "Print what a config means and what is wrong with it, without a GPU or torchrun.", PLAN)
    _add_config(parser, is_required=False)
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--world-size", type=_count, metavar="N", help="ranks of the run (default: the fewest the placement names)"
    )
    on_gpus = f"with --gpu: enough for {GPUS_PER_NODE} GPUs on each"
    run.add_argument("--nodes", type=_count, metavar="N", help=f"nodes of the run (default: 1; {on_gpus})")
    run.add_argument("--download", action="store_true", help="first download models named by their ids, as train does")
    absent = "weights, tokenizers and data that are not here yet are warnings, not errors"
    run.add_argument("--ignore-missing", action="store_true", help=absent)
    run.add_argument("--all", action="store_true", help="check every prompt (default: a sample of each file)")
    run.add_argument("--all-keys", action="store_true", help="also print keys that have their default values")
    gpus = parser.add_argument_group("estimates, which need no weights and no data")
    types = ", ".join(GPUS)
    gpus.add_argument(
        "--gpu", type=str.lower, choices=GPUS, metavar="TYPE", help=f"memory and time on GPUs of this type: {types}"
    )
    gpus.add_argument("--suggest", action="store_true", help="with --gpu: layouts and offloads that fit, as YAML")
    gpus.add_argument("--shape", metavar="NAME", help="a shipped shape in place of model.path, such as qwen2.5-7b")
    other = parser.add_argument_group("instead of a plan")
    listed = "list the config's keys, or only keys with WORD in their names, else in their meanings"
    other.add_argument("--keys", nargs="?", const="", metavar="WORD", help=listed)
    other.add_argument("--init", metavar="MODEL", help="print a commented config for a model, with --gpu and --gpus")
    other.add_argument("--gpus", type=_count, metavar="N", help="with --init: GPUs of the run")
    args = parser.parse_intermixed_args(words)
    if args.suggest and not args.gpu:
        parser.error(f"--suggest needs --gpu TYPE: of {types}")
    if args.init and not (args.gpu and args.gpus):
        parser.error("--init needs --gpu TYPE and --gpus N, such as --gpu h100 --gpus 8")
    if args.config is None and args.keys is None and not args.init:
        parser.error("the following arguments are required: CONFIG")
    return args


STARTS = {
    "train": ("Train on this node: check the config, then start one process per GPU.", TRAIN),
    "sft": ("Fine-tune the actor on examples, on this node: check the config, then start one process per GPU.", SFT),
    "reward-model": (
        "Train a reward model on preferences, on this node: check the config, then start a process per GPU.",
        REWARD_MODEL,
    ),
}
"""Command that starts ranks -> its description and examples."""


def start_arguments(name: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command of STARTS."""
    parser = _parser(name, *STARTS[name])
    _add_config(parser)
    _add_nproc(parser, "one per visible GPU, else 2")
    return parser.parse_intermixed_args(words)


train_arguments = partial(start_arguments, "train")
sft_arguments = partial(start_arguments, "sft")
reward_model_arguments = partial(start_arguments, "reward-model")


def rank_arguments() -> argparse.Namespace:
    """Parse the arguments of a rank."""
    description = "Train a language model by PPO: Megatron actor and critic, SGLang rollouts."
    parser = _parser("train", description, TRAIN, prog="torchrun --nproc-per-node N -m megappo.train")
    _add_config(parser)
    return parser.parse_intermixed_args()


def evaluate_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments of `megappo evaluate`; `config` is "" where none is named."""
    parser = _parser("evaluate", "Evaluate a checkpoint or a model on a config's held-out data.", EVALUATE)
    parser.add_argument("source", metavar="CHECKPOINT", type=Path, help="what to evaluate")
    keys = "YAML file (default: the run's own), overrides"
    parser.add_argument("words", metavar="CONFIG key=value", nargs="*", default=[], help=keys)
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: beside what is evaluated")
    _add_nproc(parser, "as many as the placement names, else one per GPU")
    args = parser.parse_intermixed_args(words)
    has_config = bool(args.words) and "=" not in args.words[0]
    args.config, args.overrides = args.words[0] if has_config else "", args.words[has_config:]
    return args


def inspect_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments of `megappo inspect`."""
    parser = _parser(
        "inspect",
        "Show what is in a checkpoint or model folder, or the prompts, examples or pairs of a config.",
        INSPECT,
    )
    parser.add_argument("path", type=Path, help="a run, checkpoint, component or Hugging Face folder, or a CONFIG.yaml")
    keys = "of a config: keys that override the file"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=keys)
    shown = "the first prompts of each file to show, besides its longest one (default: 3)"
    parser.add_argument("--show", type=_number, default=3, metavar="N", help=shown)
    parser.add_argument("--tokens", action="store_true", help="also show their tokens, ID='PIECE', special ones in []")
    checked = "to check, spread over each file; 0: all (default: 10000)"
    parser.add_argument("--records", type=_number, default=10_000, metavar="N", help=checked)
    args = parser.parse_intermixed_args(words)
    if not args.path.exists():
        parent = next(path for path in args.path.absolute().parents if path.is_dir())
        found = ", ".join(sorted(path.name for path in parent.iterdir() if path.is_dir()))
        parser.exit(2, f"error: no folder {args.path}; {parent} has {found or 'none'}\n")
    return args


def doctor_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of `megappo doctor`."""
    parser = _parser("doctor", "Check whether this machine can train.", "example: megappo doctor packages gpus")
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"{', '.join(CHECKS)} (default: all)")
    args = parser.parse_args(words)
    if unknown := [name for name in args.checks if name not in CHECKS]:
        parser.exit(2, f"error: no check {', '.join(unknown)}: expected some of {', '.join(CHECKS)}\n")
    return args


def serve_arguments(words: Sequence[str]) -> None:
    """Refuse arguments without a model first; SGLang parses what follows it."""
    if words and not words[0].startswith("-"):
        return
    if {"-h", "--help"} & set(words):
        print(SERVE)
        sys.exit()
    print(f"error: expected a model first, found {words[0] if words else 'nothing'}; {SERVE}", file=sys.stderr)
    sys.exit(2)


class _CommandLine(argparse.ArgumentParser):
    """A parser that knows how keys are written elsewhere."""

    def error(self, message: str) -> NoReturn:
        dashed = re.search(r"--([a-z_]+\.[\w.,]+)[= ](\S+)", message)
        advice = f"; keys have no dashes here: write {dashed[1]}={dashed[2]}" if dashed else ""
        super().error(message + advice)


def _parser(name: str, description: str, epilog: str, prog: str = "") -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    return _CommandLine(prog or f"megappo {name}", None, description, epilog, formatter_class=layout)


def _add_config(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    nargs = None if is_required else "?"
    parser.add_argument("config", metavar="CONFIG", nargs=nargs, help="YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="overrides of single keys")


def _add_nproc(parser: argparse.ArgumentParser, default: str) -> None:
    chosen = os.environ.get("NPROC") or None
    help_of_nproc = f"processes to start (default: the variable NPROC, else {default})"
    parser.add_argument("--nproc", type=_count, default=chosen, metavar="N", help=help_of_nproc)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, at most {MOST_RANKS}, found {text}")
    return int(text)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, found {text!r}")
    return int(text)
