"""Cases of a test that show for more models, methods or ways what its other cases show."""

from collections.abc import Container, Iterable

import pytest


def slow_ones(names: Iterable[str], slow: Container[str]) -> list:
    """A test's cases, those in `slow` with the marker of that name: run by `bash launch/test.sh -m slow`."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]
