"""One word for one thing: docstrings, comments, messages, names and pages avoid words that CONTRIBUTING.md retires."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECKED = ("configs", "docs", "launch", "megappo", "tests", "tools")
RETIRED = re.compile(
    r"\b(tells?|told|telling|says?|said|saying|asks|asked|anew|spoil(s|ed|t)?|reckon(s|ed|ing)?|look(s|ed) at|but for|"
    r"of no account|thereby|therein|thereof|wherein|whereby|without a word|signs? of life|way of the weights|"
    r"what is left|what is not|whatever has become|so-many-th|every so many)\b",
    re.IGNORECASE,
)
PHRASES = re.compile(r"\b(those\s+(of|that)|[Tt]hat\s+of)\b|\binside(?=[.,;:])|[.:;]\s+Of\s(?!course)")
"""Repeat the noun; a context manager acts "while the block runs"; a sentence begins with its subject."""
BEGINNING = re.compile(r"\s*(What|Of|Whether|Those|Where|Which|Who|That which|Whatever|Whose|How|Have)\b")
"""First words that no docstring has: it begins with a verb, or with a noun phrase that a reader would search for."""
FRAGMENT = re.compile(r"^\s+(\w+(?:, \w+)*: (?:of|by|since)) ", re.MULTILINE)
"""Attribute whose description only ends with its name, as in "seed: of the order": write "seed: seed of the order"."""
NAMES = re.compile(r"(^|_)(told|tells|say|says|said|spoiled|reckon|anew|judged)(_|$)", re.IGNORECASE)
PROSE = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


def docstring_faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):  # a string by itself describes what it follows, or what it begins
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstring = node.value.value
            if BEGINNING.match(docstring):
                yield f"line {node.lineno}: a docstring begins with {docstring.split()[0]!r}"
            for found in FRAGMENT.finditer(docstring):
                yield f"line {node.lineno + docstring.count(chr(10), 0, found.start(1))}: {found[1]!r}"


def word_faults(text: str, first_line: int = 1) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), first_line):
        for found in RETIRED.finditer(line):
            yield f"line {number}: {found[0]!r}"
    for found in PHRASES.finditer(text):  # may span lines
        yield f"line {first_line + text.count(chr(10), 0, found.start())}: {' '.join(found[0].split())!r}"


def faults(path: Path) -> list[str]:
    """Return the retired words of a Python file or of a page of text."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return list(word_faults(text))
    found = list(docstring_faults(text))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in PROSE:
            found += word_faults(token.string, token.start[0])
        elif token.type == tokenize.NAME and NAMES.search(token.string):
            found.append(f"line {token.start[0]}: the name {token.string}")
    return found


def checked_files() -> list[Path]:
    found = [ROOT / "README.md"]
    for folder in CHECKED:
        found += [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in (".py", ".md", ".sh", ".yaml")]
    found.remove(Path(__file__))  # its patterns are the retired words
    return found


def test_the_contributors_page_has_retired_words_in_its_table_alone() -> None:
    sections = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("\n## ")
    assert [section.partition("\n")[0] for section in sections if list(word_faults(section))] == ["Words"]


@pytest.mark.parametrize("path", checked_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_retired_words(path: Path) -> None:
    assert faults(path) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.py", 'def f():\n    """Whether it is so."""\n', "line 2: a docstring begins with 'Whether'"),
        ("a.py", 'N = 2\n"""Of a worker."""\n', "line 2: a docstring begins with 'Of'"),
        ("a.py", 'def f():\n    """Have a worker end."""\n', "line 2: a docstring begins with 'Have'"),
        ("a.py", 'def f():\n    """Do it.\n\n    Args:\n        seed: of it.\n    """\n', "line 5: 'seed: of'"),
        ("a.py", 'N = 2\n"""Ranks of the actor, and those\nof the critic."""\n', "line 2: 'those of'"),
        ("a.py", "x = 1  # which is told later\n", "line 1: 'told'"),
        ("a.py", 'x = f"it says {1}"\n', "line 1: 'says'"),
        ("a.py", "told_means = 1\n", "line 1: the name told_means"),
        ("a.md", "# Page\n\nIt starts anew.\n", "line 3: 'anew'"),
        ("a.md", "# Page\n\nOne layer has it. Of two\nthe last.\n", "line 3: '. Of'"),
    ],
)
def test_a_retired_word_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    (tmp_path / name).write_text(text, "utf-8")
    assert faults(tmp_path / name) == [fault]
