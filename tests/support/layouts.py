"""A layout as the config writes it."""

from dataclasses import asdict
from typing import Any

from megappo.config.schema import Parallel
from megappo.placement.layout import Layout


def parallel_of(layout: Layout, **others: Any) -> Parallel:
    """The section that gives a layout on its ranks; `others` are the section's keys that no layout has."""
    sizes = asdict(layout)
    del sizes["ranks"]
    return Parallel(**sizes, **others)
