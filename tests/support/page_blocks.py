"""The code blocks of README.md, CONTRIBUTING.md and docs/: what a reader copies, and what is printed."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
}
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$|^#+ ", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"# Needs [^\n]*\b(GPUs?|SLURM|network|nodes|Docker|Apptainer|downloads?|minutes)\b")
SERVES = "# Runs until Ctrl-C"
FILE = re.compile(r"# ([\w.]+\.(?:py|yaml))\b")


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        language: the word after the backquotes.
        text: its lines, without the indentation of the fence.
        printed: for a block of commands, the output that the page shows below it, in the same section; else "".
    """

    page: str
    language: str
    text: str
    printed: str = ""

    @property
    def needs(self) -> str:
        """Return the first line of a block that names what a test lacks, else ""."""
        found = NEEDS.match(self.text)
        return self.text.partition("\n")[0] if found else ""

    @property
    def file(self) -> str:
        """Return the name of the file that a reader saves this block to, else ""."""
        found = FILE.match(self.text)
        return found[1] if found and self.language in ("python", "yaml") else ""


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    blocks: list[Block] = []
    is_new_section = True
    for found in BLOCK.finditer(PAGES[page]):
        if found[3] is None:
            is_new_section = True
            continue
        text = re.sub(f"^{found[1]}", "", found[3], flags=re.MULTILINE)
        follows_commands = not is_new_section and blocks[-1].language == "bash"
        if found[2] == "text" and follows_commands:
            blocks[-1] = Block(page, "bash", blocks[-1].text, printed=text)
        blocks.append(Block(page, found[2], text))
        is_new_section = False
    return blocks


BLOCKS = {page: blocks_of(page) for page in PAGES}
RUN = {
    page: [block for block in blocks if block.language == "bash" and not block.needs] for page, blocks in BLOCKS.items()
}
"""The blocks of commands that tests/run/test_pages.py runs, by page."""
