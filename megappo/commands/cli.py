"""The command `megappo`: a table of commands, each a function of its arguments that returns an exit code.

A command's arguments are checked before its module is imported, which may take seconds.
"""

import gc
import os
import select
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, NamedTuple, NoReturn

from megappo.commands import arguments
from megappo.errors import ActionableError, own_command
from megappo.runtime.interruption import COMMAND
from megappo.table import resolved

TRAIN, MODELS, RESULTS = "Train", "Models and checkpoints", "Inspect a run"
EXAMPLE = "Example: megappo plan configs/quickstart.yaml. Each command has a --help of its own."
KEYS = "megappo.config.describe:keys"
RANKS = "checking the config, then starting processes that import torch, megatron-core and SGLang"
TAKES_KEYS = ("train", "sft", "reward-model", "plan", "evaluate", "quickstart", "inspect")


class Command(NamedTuple):
    """A command.

    Attributes:
        function: "module:function". Where importing the module takes long, `megappo.commands.arguments` has a function
            NAME_arguments, which ends the process if the arguments are wrong or ask for help.
        note: printed first where the command then imports for seconds.
    """

    function: str
    meaning: str
    group: str
    note: str = ""


COMMANDS = {
    "quickstart": Command(
        "megappo_tools.quickstart:main", "train a small model on this machine, in a few minutes", TRAIN
    ),
    "plan": Command(
        "megappo.commands.plan:main", "check a config, show what it means, estimate memory and time", TRAIN
    ),
    "train": Command("megappo.commands.local:train", "train on this node, one process per GPU", TRAIN, RANKS),
    "sft": Command("megappo.commands.local:sft", "fine-tune a model on examples, on this node", TRAIN, RANKS),
    "reward-model": Command(
        "megappo.commands.local:reward_model", "train a reward model on preferences, on this node", TRAIN, RANKS
    ),
    "doctor": Command("megappo.commands.doctor:main", "check that this machine can train", TRAIN, "importing torch"),
    "evaluate": Command(
        "megappo_tools.evaluate:main", "evaluate a checkpoint or a model on held-out data", MODELS, RANKS
    ),
    "convert": Command("megappo_tools.convert:main", "convert, compare and reshard weights", MODELS, "importing torch"),
    "serve": Command("megappo.commands.serve:main", "serve a model by SGLang over HTTP", MODELS),
    "inspect": Command(
        "megappo_tools.inspect_checkpoint:main",
        "show a checkpoint, a model folder, or a config's prompts",
        RESULTS,
        "importing torch",
    ),
    "samples": Command("megappo.commands.samples_command:main", "show a run's responses, with their scores", RESULTS),
    "timeline": Command("megappo.commands.timeline_command:main", "write one trace of all ranks' phases", RESULTS),
    "import": Command(
        "megappo_tools.importer:main", "translate a script of verl, TRL or OpenRLHF into a config", TRAIN
    ),
    "report": Command("megappo.commands.report_command:report", "write a run's report again", RESULTS),
    "compare": Command("megappo.commands.report_command:compare", "compare several runs on one page", RESULTS),
}


def main() -> int:
    """Run a command and return its exit code; 2 where there is no such command.

    A reader of the output that has left, such as `head`, ends the command as it ends a program in C.
    """
    try:
        try:
            return _run(sys.argv[1:])
        finally:
            sys.stdout.flush()
            gc.freeze()  # or the interpreter looks through all objects of torch as it ends, which takes a second
    except BrokenPipeError:
        if not _reader_has_left():
            raise  # of another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        return 128 + signal.SIGPIPE


def _reader_has_left() -> bool:
    """Return whether nobody reads this process's output any more."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(words: Sequence[str]) -> int:
    os.environ["PYTHONSAFEPATH"] = "1"  # files of the working folder must not hide modules of what a command starts
    nproc = [f"NPROC={os.environ['NPROC']}"] if os.environ.get("NPROC") else []
    os.environ.setdefault(COMMAND, shlex.join([*nproc, own_command("megappo"), *words]))
    if not words or words[0] not in COMMANDS:
        _help(words)
    name, *rest = words
    if check := getattr(arguments, f"{name.replace('-', '_')}_arguments", None):
        check(rest)
    if COMMANDS[name].note and not {"-h", "--help"} & set(rest):
        print(COMMANDS[name].note, file=sys.stderr, flush=True)
    try:
        return resolved(COMMANDS[name].function)(rest)
    except ActionableError as error:
        print(error.report(0), file=sys.stderr)
        return error.exit_code


def _help(words: Sequence[str]) -> NoReturn:
    """Show the commands, complete a command line for the shell, or name the unknown command."""
    import typer

    app = typer.Typer(help=f"PPO for large language models.\n\n{EXAMPLE}", no_args_is_help=True)
    app.callback(context_settings={"help_option_names": ["-h", "--help"]})(lambda: None)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name, command in COMMANDS.items():
        completion = _keys if name in TAKES_KEYS else None

        def start(words: Annotated[list[str] | None, typer.Argument(autocompletion=completion)] = None) -> None:
            pass  # `main` runs it

        app.command(name, help=command.meaning, rich_help_panel=command.group, context_settings=settings)(start)
    app(list(words), prog_name="megappo")
    raise SystemExit


def _keys(incomplete: str) -> list[str]:
    """Return the config keys that a word may become, to be completed by the shell."""
    if not incomplete or "=" in incomplete:
        return []  # the shell completes files
    return [f"{key.path}=" for key in resolved(KEYS)() if key.path.startswith(incomplete) and key.section is None]
