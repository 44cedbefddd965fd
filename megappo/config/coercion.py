"""Reading a YAML value as the type its key declares, losing nothing."""

from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic_core import PydanticCustomError

LARGEST = 2**63 - 1
EXPLAINED = "explained"
"""The type of an error whose text is shown besides the expected values."""


def as_declared(value: object, annotation: object) -> object:
    """The value as the declared type, where YAML reads it as another one: `1e-6` is a string to PyYAML.

    Whole numbers may be written as `1e3`; a single string may stand for a list of one, unless it is a word that stands
    for itself there. Bounds, literals and sections are left to pydantic.

    Raises:
        ValueError: reading it so would lose something: 1.5 as an int, true as a number, 1 as a bool.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return as_declared(value, args[0])
    if origin in (Union, UnionType):
        words = [word for option in args if get_origin(option) is Literal for word in get_args(option)]
        others = [option for option in args if option is not NoneType and get_origin(option) is not Literal]
        fitting = [option for option in others if (get_origin(option) is dict) == isinstance(value, dict)]
        return value if value is None or value in words or len(fitting) != 1 else as_declared(value, fitting[0])
    if origin is tuple:
        return _as_tuple(value, args)
    if annotation is int or annotation is float:
        return _as_number(value, annotation)
    if annotation is bool and not isinstance(value, bool):
        raise ValueError("not a bool")
    return value


def _as_tuple(value: object, args: tuple) -> object:
    item = get_args(args[0])[0] if get_origin(args[0]) is Annotated else args[0]
    if isinstance(value, str) and args[-1] is ... and (item is str or get_origin(item) is Literal):
        return (value,)
    return tuple(as_declared(item, args[0]) for item in value) if isinstance(value, list | tuple) else value


def _as_number(value: object, kind: type) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a number")
    if isinstance(value, str):
        value = _number_in(value.strip())
    if kind is float:
        return _as_float(value)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("not a whole number")
    if abs(value) > LARGEST:
        raise PydanticCustomError(EXPLAINED, "of more than 64 bits")
    return int(value)


def _number_in(text: str) -> int | float:
    """The number; Python itself would also take the digits of any script, and 1_000."""
    if not text.isascii() or "_" in text:
        raise ValueError("not a number")
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError("too large") from error
