"""Between a process and its owner: `python -m megappo.keeper OWNER_PID COMMAND ...`.

The keeper runs the command. When that ends, or the owner is gone, whatever ended it, or SIGTERM asks for it, the keeper
ends every process that descends from it: also one that has a session of its own, or whose parent ended before it, as
the kernel makes the keeper its parent then. The standard library alone, so it is there at once and takes little memory.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from megappo.lifetime import adopt_orphans, die_with

POLL_SECONDS = 0.02
KILL_TIMEOUT_SECONDS = 10.0


def main() -> int:
    """Keep the command that the arguments name."""
    owner, *command = sys.argv[1:]
    return keep(int(owner), command)


def keep(owner: int, command: Sequence[str], before_kill: Callable[[int], object] = lambda pid: None) -> int:
    """Run a command until it ends or must end, then end all that descends from this process.

    Args:
        owner: this process's parent.
        command: inherits the standard streams; it is the only one to have the input.
        before_kill: called with the pid of every process that is about to be killed.
    Returns:
        The command's exit code; 128 + n when signal n ended it, or this process was asked by it to end.
    """
    signal.signal(signal.SIGTERM, _leave)
    try:
        adopt_orphans()
        die_with(owner, signal.SIGTERM)
        code = _run(command)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the command may have ended by itself
        _end_descendants(before_kill)
    return code if code >= 0 else 128 - code


def _leave(signum: int, frame: FrameType | None) -> None:
    # Only once: the kernel may announce a parent's end again for each of its threads, and an exit raised twice would
    # leave the cleaning undone.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signum)


def _run(command: Sequence[str]) -> int:
    # Nothing here has a second thread, which could hold a lock that the child needs before it runs the command.
    process = subprocess.Popen(command, preexec_fn=partial(die_with, os.getpid()))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    while True:
        pid, status = os.wait()  # orphans end here, too
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode


def _end_descendants(before_kill: Callable[[int], object]) -> None:
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while not _is_childless() and time.monotonic() < deadline:
        pids = _descendants()
        for pid in pids:
            before_kill(pid)  # of all first: one's end is another's
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    if left := _descendants():
        print(f"error: processes {left} could not be ended within {KILL_TIMEOUT_SECONDS:g} s", file=sys.stderr)


def _is_childless() -> bool:
    """Whether no child is left, and so no descendant: each would have become a child when its parent ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _descendants() -> list[int]:
    """Living processes that descend from this one."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    children: dict[int | None, list[int]] = {}
    for pid in pids:
        children.setdefault(_parent(pid), []).append(pid)
    found, fresh = [], [os.getpid()]
    while fresh:
        fresh = [child for pid in fresh for child in children.get(pid, [])]
        found += fresh
    return found


def _parent(pid: int) -> int | None:
    """The parent of a process; None for one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent = stat.rsplit(")", 1)[1].split()[:2]  # the name before may hold anything
    return None if state in "ZX" else int(parent)


if __name__ == "__main__":
    sys.exit(main())
