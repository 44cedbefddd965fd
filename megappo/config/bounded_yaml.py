"""YAML text -> nodes, of no more than a config can need: a bomb is refused before it goes off."""

from typing import Any

import yaml

MOST_NODES = 5_000
"""Keys and values of one document; an alias counts as all that it stands for."""
DEEPEST = 20
"""Levels of nesting."""
LONGEST_NUMBER = 100
"""Characters."""

_TAG = "tag:yaml.org,2002:"
_READ = tuple(_TAG + kind for kind in ("null", "bool", "int", "float", "merge"))


class NotReadError(yaml.MarkedYAMLError):
    """Valid YAML that a config may not hold; `problem` says what to write instead."""

    def __init__(self, problem: str, mark: Any):
        super().__init__(problem=problem, problem_mark=mark)


class BoundedLoader(yaml.SafeLoader):
    """A loader that counts while it composes, and that takes dates and `=` for the text they are."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _READ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = self._num_nodes = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """The next node; called for each of the document, nested as the document is."""
        event = self.peek_event()
        before = self._num_nodes
        if self._depth == DEEPEST:
            raise NotReadError(
                f"more than {DEEPEST} levels of nesting, and no key needs as many: correct it", event.start_mark
            )
        if getattr(event, "tag", None) is not None:
            raise NotReadError("tags (! or !!) are not read: leave it out, and quote what is text", event.start_mark)
        self._depth += 1
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._num_nodes += 1
            self._sizes[node] = self._num_nodes - before
        elif node in self._sizes:
            self._num_nodes += self._sizes[node]
        else:
            raise NotReadError("an alias refers to what holds it: write out what is meant", event.start_mark)
        if self._num_nodes > MOST_NODES:
            found = f"more than {MOST_NODES:,} keys and values, aliases written out"
            raise NotReadError(f"{found}: is it the right file?", event.start_mark)
        return node

    def scalar(self, node: yaml.ScalarNode) -> object:
        """A node's text, number, bool or None.

        Raises:
            ValueError: it looks like a number and is none, or half a character was escaped, which no file can hold.
        """
        is_number = node.tag in (_TAG + "int", _TAG + "float")
        if is_number and len(node.value) > LONGEST_NUMBER:
            raise ValueError(f"a number of {len(node.value):,} characters: write at most {LONGEST_NUMBER}")
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise ValueError("it escapes half of a character (a surrogate): write the character itself")
        try:
            return self.construct_object(node)
        except (ValueError, OverflowError) as error:  # such as 0x_
            raise ValueError(f"{node.value!r} is no number: correct it, or quote it") from error
