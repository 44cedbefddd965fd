"""Between an engine's server and its owner: `python -m megappo.engines.server_keeper OWNER_PID FOLDER`.

Runs the server as `megappo.runtime.keeper` runs a command, and removes what its processes leave: shared memory and the
temporary folder. Standard input goes on to the server. It imports the standard library alone, so it is there at once
and takes little memory.
"""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from megappo.runtime.keeper import keep
from megappo.runtime.variables import PYTHON


def main() -> int:
    """Serve until the server ends; its exit code, 128 + n when signal n ended it."""
    owner, folder = int(sys.argv[1]), Path(sys.argv[2])
    files: set[Path] = set()
    try:
        server = [*PYTHON, "-m", "megappo.engines.server"]
        return keep(owner, server, before_kill=lambda pid: files.update(shared_memory(pid)))
    finally:
        for path in files:
            path.unlink(missing_ok=True)
        remove_traces(folder)


def remove_traces(folder: Path) -> None:
    """Remove an engine's temporary folder, and the shared-memory files that the server has linked there."""
    for link in folder.glob("sgl*"):
        if link.is_symlink():
            link.readlink().unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_stale_loads() -> None:
    """Remove this user's files in which SGLang's ranks tell their load that no process has mapped. No folder leads to
    them where an engine's went before its keeper was killed."""
    found = [entry for entry in os.scandir("/dev/shm") if entry.name.startswith("sglang_loads_")]
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    mapped = set().union(*map(shared_memory, pids))
    for entry in found:
        with suppress(FileNotFoundError):  # another engine starts at the same time
            if Path(entry.path) not in mapped and entry.stat().st_uid == os.getuid():
                os.unlink(entry.path)


def shared_memory(pid: int) -> set[Path]:
    """SGLang's shared-memory files that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    return {Path(line.split()[5]) for line in maps.splitlines() if "/dev/shm/sgl" in line}


if __name__ == "__main__":
    sys.exit(main())
