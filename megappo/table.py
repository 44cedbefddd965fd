"""Tables that a person may add to: of methods, families, components, transports, metrics."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")
Function = str | Callable[..., Any]
"""A function or class, or "module:name" of one, that is imported when it is called."""


class Table(Mapping[str, Entry], Generic[Entry]):
    """Entries by name, in the order in which they were added.

    Args:
        kind: what the entries are, for messages: "policy loss".
    """

    def __init__(self, kind: str, entries: Mapping[str, Entry]):
        self.kind = kind
        self._entries = dict(entries)

    def register(self, name: str, entry: Entry) -> None:
        """Add an entry.

        Raises:
            ValueError: there is one of this name.
        """
        if name in self._entries:
            raise ValueError(f"the {self.kind} {name!r} exists already: choose another name")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def resolved(function: Function) -> Callable[..., Any]:
    """The function that an entry names: "module:function", of a module that the table must not import, or itself."""
    if callable(function):
        return function
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)
