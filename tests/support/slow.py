"""Mark the cases of a test that only repeat, for more models, methods or modes, what its other cases test."""

from collections.abc import Container, Iterable

import pytest


def slow_ones(names: Iterable[str], slow: Container[str]) -> list:
    """Return a test's cases, with those in `slow` marked so: `bash launch/test.sh -m slow` runs them."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]
