"""Commands that benchmarks start."""

import os
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from typing import Any

from megappo.runtime.keeper import die_with


def run_child(command: Sequence[object], **options: Any) -> int:
    """Run a command to its end and return its exit code.

    It gets SIGTERM when this process ends first, whatever ended it: a run saves and exits.

    Args:
        options: options of subprocess.run; with check=True a failure is an error.
    """
    end = partial(die_with, os.getpid(), signal.SIGTERM)
    return subprocess.run([*map(str, command)], preexec_fn=end, **options).returncode
