"""A keeper between a command and its owner: `python -m megappo.runtime.keeper OWNER_PID COMMAND ...`.

The keeper runs the command. When that ends, or the owner is gone, whatever ended it, or SIGTERM arrives, the keeper
ends every process that descends from it, even one that has a session of its own, or whose parent ended before it: the
kernel then makes the keeper its parent. When the owner is gone the kernel sends the keeper SIGCONT, so that it
does all this even if it was stopped. It imports psutil and the standard library alone, so it starts at once and
takes little memory.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial

import psutil

AWAITED = {signal.SIGTERM, signal.SIGCHLD, signal.SIGCONT}
POLL_SECONDS = 0.02
KILL_TIMEOUT_SECONDS = 10.0
REMOVED = "MEGAPPO_REMOVED_AT_THE_END"
"""Environment variable with a file that the keeper removes when the command has ended, however that was."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of Linux's prctl."""


def main() -> int:
    """Keep the command that the arguments name."""
    owner, *command = sys.argv[1:]
    return keep(int(owner), command)


def keep(owner: int, command: Sequence[str]) -> int:
    """Run a command until it ends or must end, then end all that descends from this process.

    Args:
        owner: this process's parent.
        command: inherits the standard streams; it is the only one to have the input.
    Returns:
        The command's exit code; 128 + n when signal n ended it, or that signal stopped this process.
    """
    # Blocked, they wait until they are read: nothing is interrupted, however often the owner's end is announced.
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started the owner may have ignored it
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    die_with(owner, signal.SIGCONT)
    try:
        code = _run(command, (owner, os.getpid()))
    finally:
        _end_descendants()
        if REMOVED in os.environ:
            with suppress(FileNotFoundError):
                os.unlink(os.environ[REMOVED])
    return code if code >= 0 else 128 - code


def die_with(parent_pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent's thread ends, even while user code runs in it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent_pid:  # it ended before the call
        os.kill(os.getpid(), by)


def ask_to_end(process: subprocess.Popen) -> None:
    """Ask a keeper of this process to end with all that it keeps, even if it is stopped."""
    process.terminate()
    process.send_signal(signal.SIGCONT)


def signal_of(code: int) -> str:
    """Return the name of the signal that a keeper's exit code reports; "" for the command's own exit code."""
    with suppress(ValueError):
        return signal.Signals(code - 128).name
    return ""


def _run(command: Sequence[str], owners: Collection[int]) -> int:
    """Run the command until it ends, its owner is gone or SIGTERM arrives; return its exit code.

    Args:
        owners: the senders whose SIGCONT means that the owner is gone; one from others, such as Slurm, is ignored.
    """
    # Nothing here has a second thread, which could hold a lock that the child needs before it runs the command.
    process = subprocess.Popen(command, preexec_fn=partial(_begin, os.getpid()))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    while (info := signal.sigwaitinfo(AWAITED)).si_signo != signal.SIGTERM:
        if info.si_signo == signal.SIGCONT and info.si_pid in owners:
            break
        pid, status = os.waitpid(-1, os.WNOHANG)
        while pid:  # it may be an orphan
            if pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode
            pid, status = os.waitpid(-1, os.WNOHANG)
    return 128 + signal.SIGTERM


def _begin(keeper: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
    die_with(keeper)


def _end_descendants() -> None:
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while _has_children() and time.monotonic() < deadline:
        for process in _descendants():
            with suppress(psutil.Error):  # it has ended, or is another user's
                process.kill()
        time.sleep(POLL_SECONDS)
    if left := [process.pid for process in _descendants()]:
        print(f"error: processes {left} could not be ended within {KILL_TIMEOUT_SECONDS:g} s", file=sys.stderr)


def _has_children() -> bool:
    """Reap the children that have ended; return whether a child remains. Without one there is no descendant: it would
    have become a child when its parent ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _descendants() -> list[psutil.Process]:
    """Return the processes that descend from this one."""
    return psutil.Process().children(recursive=True)


if __name__ == "__main__":
    sys.exit(main())
