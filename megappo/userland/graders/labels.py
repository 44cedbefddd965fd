"""Labels as texts."""

from decimal import Decimal
from typing import Any


def as_text(label: Any) -> str:
    """A label that is a text as it is, and a number written out: 1e-07 would be a product to LaTeX. "" of others."""
    if isinstance(label, str):
        return label
    is_number = isinstance(label, int | float) and not isinstance(label, bool)
    return format(Decimal(str(label)), "f") if is_number else ""
