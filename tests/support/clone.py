"""A copy of the repository, as a user's clone has it."""

import shutil
import subprocess
import sys
from pathlib import Path

from program import REPOSITORY


def clone(folder: Path) -> None:
    """Copy all files that git does not ignore into a folder; its `.venv` is this environment."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in filter(lambda name: (REPOSITORY / name).is_file(), listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
