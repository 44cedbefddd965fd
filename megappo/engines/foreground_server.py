"""A server of SGLang in the foreground, for `megappo serve`."""

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from megappo.engines import launch
from megappo.engines.server_keeper import remove_traces
from megappo.runtime import platform
from megappo.runtime.keeper import ask_to_end

CPU_ARGUMENTS = launch.CPU_ARGUMENTS | {"dtype": "float32"}


def serve(command_line: Sequence[str]) -> int:
    """Run SGLang's process, which parses its arguments; return its exit code, 128 + n when signal n ended this one."""
    launch.remove_stale_traces()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    temporary = launch.temporary_folder()
    settings = {"command_line": [*command_line], "cpu_arguments": CPU_ARGUMENTS}
    variables = {"PYTHONWARNINGS": "ignore"} | launch.inherited_environment(temporary)  # which are for developers
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
