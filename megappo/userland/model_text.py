"""Values of user code as JSON that a model reads: numbers, dates and records as people write them. Uses the standard
library alone, so that a worker starts at once."""

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from string import Formatter
from typing import Any
from uuid import UUID

CONVERSIONS = ("model_dump", "isoformat", "tolist", "__float__")
"""Methods that return a value as JSON has it: of pydantic's models, dates, NumPy and torch, decimals and fractions."""


class ModelTextFormatter(Formatter):
    """Fills templates as `str.format` does, with values other than text as `model_text`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return format(value if format_spec else model_text(value), format_spec)


def model_text(value: Any) -> str:
    """Return a text as it is, and anything else as JSON without escapes beyond ASCII.

    Raises:
        TypeError: JSON has no form for a value; the message names its type.
        ValueError, RecursionError: it holds a lone surrogate, or itself.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=as_json)
    text.encode()
    return text


def as_json(value: Any) -> Any:
    """Return a value that JSON lacks as one that it has: dates in ISO 8601, decimals as numbers, dataclasses as
    objects.

    Raises:
        TypeError: see `model_text`.
    """
    if not isinstance(value, type):
        if is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Enum):
            return value.value
        if isinstance(value, UUID | PurePath):
            return str(value)
        if str(getattr(value, "dtype", "")).startswith("datetime64"):  # `tolist` may return nanoseconds
            value = value.astype(str)
        for name in CONVERSIONS:
            if hasattr(value, name):
                return getattr(value, name)()
    raise TypeError(f"{value!r:.80} is {type(value).__name__}")
