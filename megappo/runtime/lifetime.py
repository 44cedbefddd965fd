"""Processes that end with each other. Uses the standard library alone, so that importing it takes no time."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LAUNCHER = "MEGAPPO_LAUNCHER"
"""Environment variable: the pid of a launcher that reports how ranks ended that could not report it themselves."""
EXIT_LOST_RANK = 3
"""Exit code of a rank that ended, without an error message, because another rank was lost."""


def die_with(parent_pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent's thread ends, even while user code runs in it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent_pid:  # it ended before the call
        os.kill(os.getpid(), by)


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of every descendant whose own parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
