"""Serve a Hugging Face folder, such as a run's hf_actor, by stock SGLang over HTTP: on GPUs, or without any on a CPU.

    megappo serve HF_FOLDER [SGLang's own arguments]

It listens on 127.0.0.1:30000 by default, and computes in fp32 by default on a CPU. Ctrl-C ends it, with its processes
and their shared memory.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megappo.architecture.model_folder import CONFIG_FILE, other_kind
from megappo.arguments import serve_arguments
from megappo.config.config_error import looked_in
from megappo.config.hub import cached_model
from megappo.engines import launch
from megappo.engines.server_keeper import remove_traces
from megappo.runtime import platform
from megappo.runtime.keeper import ask_to_end

CPU_ARGUMENTS = launch.CPU_ARGUMENTS | {"dtype": "float32"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal, or until the server has ended; return 2 where the command is wrong."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    serve_arguments(arguments)
    if {"-h", "--help"} & set(arguments):
        return _serve(["--help"])
    folder, *rest = cached_model(arguments[0]), *arguments[1:]
    fault = folder_fault(Path(folder)) or platform.unseen_gpus()
    return _refuse(fault) if fault else _serve(["--model-path", folder, *rest])


def folder_fault(folder: Path) -> str | None:
    """Return why a folder cannot be served, judged by its files' names; None if it can."""
    if not folder.is_dir():
        wanted = "a Hugging Face folder, such as the hf_actor in a run's trainer.output_dir"
        return f"no folder {folder}{looked_in(folder)}: expected {wanted}"
    if kind := other_kind(folder):
        return f"{folder} {kind}"
    for pattern in (CONFIG_FILE, "*.safetensors"):
        if not any(folder.glob(pattern)):
            return f"{folder} is not a complete Hugging Face folder: it has no {pattern}"
    return None


def _serve(command_line: list[str]) -> int:
    """Run SGLang's process, which parses its arguments; return its exit code, 128 + n when signal n ended this one."""
    launch.remove_stale_traces()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    temporary = launch.temporary_folder()
    settings = {"command_line": command_line, "cpu_arguments": CPU_ARGUMENTS}
    variables = launch.inherited_environment(temporary)
    if platform.has_cuda():
        variables = launch.with_toolkit(variables)
    keeper = launch.start_keeper(settings, temporary, variables)
    try:
        return keeper.wait()
    finally:
        ask_to_end(keeper)  # it ends SGLang's processes and removes their traces
        keeper.wait()
        remove_traces(temporary)


def _leave(signum: int, frame: FrameType | None) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # once: what follows cleans up
    sys.exit(128 + signum)


def _refuse(fault: str) -> int:
    print(f"error: {fault}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
