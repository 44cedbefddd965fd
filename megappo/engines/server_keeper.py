"""Between an engine's server and its owner: `python -m megappo.engines.server_keeper OWNER_PID FOLDER`.

Runs the server as `megappo.runtime.keeper` runs a command, and removes what its processes leave: shared memory and the
temporary folder. The server gets its standard input. It imports the standard library alone, so it starts at once and
takes little memory.
"""

import shutil
import sys
from contextlib import suppress
from pathlib import Path

from megappo.runtime.keeper import keep
from megappo.runtime.machine import PYTHON

SHARED_MEMORY = Path("/dev/shm")
LOADS_PREFIX = "sglang_loads_"
"""Prefix of the file in which SGLang's ranks report their load; `sglang_patches.name_shared_memory`'s name follows."""


def main() -> int:
    """Serve until the server ends; return its exit code, or 128 + n when signal n ended it."""
    owner = int(sys.argv[1])
    folder = Path(sys.argv[2])
    try:
        return keep(owner, [*PYTHON, "-m", "megappo.engines.server"])
    finally:
        remove_traces(folder)


def remove_traces(folder: Path) -> None:
    """Remove an engine's temporary folder, and the shared memory that is named after it."""
    for path in SHARED_MEMORY.glob(f"{LOADS_PREFIX}{folder.name}_*"):
        with suppress(PermissionError):  # another user's
            path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
