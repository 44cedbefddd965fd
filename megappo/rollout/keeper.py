"""Between an engine's server and its owner: `python -m megappo.rollout.keeper OWNER_PID FOLDER`.

When the owner is gone, whatever ended it, or when the server ends, the keeper ends all processes of its session and
removes what they left: shared memory and the temporary folder. SIGTERM asks for the same. Standard input goes on to the
server. The keeper imports the standard library alone, so it is there at once and takes little memory.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from megappo.lifetime import die_with

POLL_SECONDS = 0.02
KILL_TIMEOUT_SECONDS = 10.0


def main() -> int:
    """Serve until the server ends; its exit code, 128 + n when signal n ended it."""
    owner, folder = int(sys.argv[1]), Path(sys.argv[2])
    signal.signal(signal.SIGTERM, _leave)
    try:
        die_with(owner, signal.SIGTERM)
        code = subprocess.Popen([sys.executable, "-m", "megappo.rollout.server", str(os.getpid())]).wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server may have ended by itself
        _end_session(folder)
    return code if code >= 0 else 128 - code


def _leave(signum: int, frame: FrameType | None) -> None:
    # Only once: the kernel may announce a parent's end again for each of its threads, and an exit raised twice would
    # leave the cleaning undone.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signum)


def _end_session(folder: Path) -> None:
    """Kill the other processes of this session and remove their traces."""
    shared_memory: set[Path] = set()
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while (others := _others()) and time.monotonic() < deadline:
        shared_memory |= {path for pid in others for path in _shared_memory(pid)}  # first: one's end is another's
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    for path in shared_memory:
        path.unlink(missing_ok=True)
    remove_traces(folder)


def remove_traces(folder: Path) -> None:
    """Remove an engine's temporary folder, and the shared-memory files that the server has linked there."""
    for link in folder.glob("sgl*"):
        if link.is_symlink():
            link.readlink().unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _others() -> list[int]:
    """Living processes of this session but this one."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and _session(pid) == os.getpid()]


def _session(pid: int) -> int | None:
    """The session of a process; None for one that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, _, _, session = stat.rsplit(")", 1)[1].split()[:4]  # the name before may hold anything
    return None if state in "ZX" else int(session)


def _shared_memory(pid: int) -> set[Path]:
    """SGLang's shared-memory files that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    return {Path(line.split()[5]) for line in maps.splitlines() if "/dev/shm/sgl" in line}


if __name__ == "__main__":
    sys.exit(main())
