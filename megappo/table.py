"""Tables that a person may add to: of methods, families, components, transports, metrics."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

Entry = TypeVar("Entry")
Function = str | Callable[..., Any]
"""A function or class, or "module:name" of one, that is imported when it is called."""


class Table(dict[str, Entry]):
    """Entries by name, in the order in which they were added.

    Args:
        kind: what the entries are, for messages: "policy loss".
    """

    def __init__(self, kind: str, entries: Mapping[str, Entry]):
        super().__init__(entries)
        self.kind = kind

    def register(self, name: str, entry: Entry) -> None:
        """Add an entry.

        Raises:
            ValueError: there is one of this name.
        """
        if name in self:
            raise ValueError(f"the {self.kind} {name!r} exists already: choose another name")
        self[name] = entry


def resolved(function: Function) -> Callable[..., Any]:
    """Return an entry's function: itself, or the function of "module:function", a module that the table must not
    import."""
    if callable(function):
        return function
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)
