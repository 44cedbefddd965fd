"""The functions at which the slow tests of this folder inject faults exist."""

import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

POINT = re.compile(r'"(megappo[\w.]*):([\w.]+)"')
MODULE = re.compile(r'^(\w+) = "(megappo[\w.]*)"$', re.MULTILINE)


def points() -> Iterator[tuple[str, str]]:
    for path in Path(__file__).parent.glob("test_*.py"):
        text = path.read_text()
        for name, module in MODULE.findall(text):
            text = text.replace(f"{{{name}}}", module)
        yield from POINT.findall(text)


POINTS = sorted(set(points()))
assert len(POINTS) > 20, "they are written otherwise now"


@pytest.mark.parametrize(("module", "path"), POINTS)
def test_a_point_is_a_function(module: str, path: str) -> None:
    assert callable(functools.reduce(getattr, path.split("."), importlib.import_module(module)))
