"""A layout as the config writes it."""

from dataclasses import asdict
from typing import Any

from megappo.config.sections import Parallel
from megappo.placement.layout import Layout


def parallel_of(layout: Layout, **others: Any) -> Parallel:
    """Return the config section of a layout on its ranks; `others` are further keys of the section."""
    sizes = asdict(layout)
    del sizes["ranks"]
    return Parallel(**sizes, **others)
