"""README.md and docs/, followed as a reader would: in a copy of the repository, each page from top to bottom."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clone import clone
from page_blocks import BLOCKS, RUN, SERVES, Block

READY = "Uvicorn running on"
CASES = [(page, number) for page, blocks in RUN.items() for number in range(len(blocks))]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("pages")]


class Reader:
    """A reader in a clone of the repository, who runs no block twice."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.outputs: dict[str, str] = {}
        self.servers: list[subprocess.Popen[str]] = []

    def follow(self, blocks: list[Block]) -> str:
        """Run the blocks that have not run yet, and return the output of the last."""
        for block in blocks:
            if block.text not in self.outputs:
                self.outputs[block.text] = self._serve(block) if block.text.startswith(SERVES) else self._run(block)
        return self.outputs[blocks[-1].text]

    def close(self) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGINT)
            server.wait()

    def _run(self, block: Block) -> str:
        expected = re.search(r"# exit code (\d+)", block.text)
        shell = self._shell(block)
        try:
            output, _ = shell.communicate(timeout=800)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
        assert shell.returncode == (int(expected[1]) if expected else 0), output
        return output

    def _serve(self, block: Block) -> str:
        self.servers.append(self._shell(block))
        seen = []
        for line in self.servers[-1].stdout or ():
            seen.append(line)
            if READY in line:
                return "".join(seen)
        raise AssertionError(f"it ended:\n{''.join(seen)}")

    def _shell(self, block: Block) -> subprocess.Popen[str]:
        paths = f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"  # as `source .venv/bin/activate` sets it
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=self.folder,
            env=os.environ | {"PATH": paths, "MEGAPPO_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A reader with the files of the pages who has followed two blocks of the README; `.venv` is this environment."""
    folder = tmp_path_factory.mktemp("clone")
    clone(folder)
    for block in (block for blocks in BLOCKS.values() for block in blocks if block.file):
        (folder / block.file).write_text(block.text)
    reader = Reader(folder)
    reader.follow(RUN["README.md"][:2])  # the runs that other pages name
    yield reader
    reader.close()


def words(line: str) -> str:
    """Return a line with `#` for each of its numbers, and with single spaces."""
    return " ".join(re.sub(r"[-+]?\d[\d.,:]*%?", "#", line).split())


@pytest.mark.parametrize(("page", "number"), CASES)
def test_commands_run_and_print_what_the_page_shows(reader: Reader, page: str, number: int):
    blocks = RUN[page][: number + 1]
    output = iter([words(line) for line in reader.follow(blocks).splitlines()])
    shown = [line for line in blocks[-1].printed.splitlines() if line.strip() not in ("", "...")]
    missing = [line for line in shown if words(line) not in output]  # each below the one before
    assert missing == []
