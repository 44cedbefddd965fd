"""YAML text -> nested dicts that remember where each key was written. Knows nothing of the schema's types."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import yaml

from megappo.config.bounded_yaml import DEEPEST, BoundedLoader, NotReadError
from megappo.config.errors import ConfigError, shorten

KeyPath = tuple[str, ...]
LONGEST_KEY = 1000  # some are paths
NO_NAME = f"a key must be a name of 1 to {LONGEST_KEY} printable characters"


@dataclass(frozen=True)
class Layer:
    """Keys from one or several merged sources.

    Attributes:
        values: nested dicts.
        origins: where a key was written, such as `run.yaml:12`; the source that wins comes first.
        errors: what was wrong with the text, one line each.
        complete: False when a source could not be read at all, so that keys may be missing for that reason.
    """

    values: dict
    origins: dict[KeyPath, str] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    complete: bool = True

    def over(self, below: "Layer") -> "Layer":
        """Both merged deeply; where they disagree this one wins."""
        return Layer(
            _merged(below.values, self.values),
            self.origins | {path: place for path, place in below.origins.items() if path not in self.origins},
            below.errors + self.errors,
            below.complete and self.complete,
        )


def read_override(text: str) -> Layer:
    """One `key=value` of the command line, the value written as in YAML."""
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not key.strip():
        found = shorten(repr(text))
        return Layer({}, errors=(f"command line: {found}: expected key=value, such as trainer.total_steps=10",))
    if len(path) > DEEPEST or not all(map(_is_name, path)):
        return Layer({}, errors=(f"command line: {shorten(repr(text))}: {NO_NAME}",))
    try:
        return parse(value, path, lambda line: "command line")
    except ConfigError as error:
        return Layer({}, errors=tuple(f"{line} (in {shorten(repr(text))})" for line in error.errors))


def parse(text: str, path: KeyPath, where: Callable[[int], str]) -> Layer:
    """YAML text as the value of `path`; () for a whole document, which must be a mapping.

    Args:
        where: how an error names a line of the text, counted from 1.
    Raises:
        ConfigError: the text is not YAML, not a mapping where it must be, or holds what no config needs.
    """
    try:
        loader = BoundedLoader(text)
        reader = _Reader(loader, where)
        value = reader.value(loader.get_single_node(), path)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        found = f"the character {chr(error.character)!r}"
        raise ConfigError(f"{where(line)}: not valid YAML: {found} is not allowed: remove it") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        kind = "" if isinstance(error, NotReadError) else "not valid YAML: "
        remedy = "" if isinstance(error, NotReadError) else "; correct it, or quote what is text"
        problem = ", ".join(filter(None, [error.context, error.problem]))
        raise ConfigError(f"{where(line)}: {kind}{problem}{remedy}") from error
    if not path and not isinstance(value, dict):
        found = "nothing" if value is None else shorten(repr(value))
        raise ConfigError(f"{where(1)}: expected sections such as `model:`, found {found}")
    above = {full_path[:end]: where(1) for full_path in _paths(path) for end in range(1, len(full_path) + 1)}
    return Layer(_nested(path, value), above | reader.origins, tuple(reader.errors))


class _Reader:
    """Builds values from YAML nodes; `yaml.safe_load` would keep the last of two equal keys and forget the lines."""

    def __init__(self, loader: BoundedLoader, where: Callable[[int], str]):
        self.loader = loader
        self.where = where
        self.origins: dict[KeyPath, str] = {}
        self.errors: list[str] = []

    def value(self, node: yaml.Node | None, path: KeyPath) -> object:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(number))) for number, item in enumerate(node.value)]
        if not isinstance(node, yaml.ScalarNode):
            return None
        # Ranks are read as written: YAML takes 010 for 8 and 1:30 for 90.
        is_ranks = len(path) == 2 and path[0] == "placement" and not _is_null(node)
        if is_ranks:
            return node.value
        try:
            return self.loader.scalar(node)
        except ValueError as error:
            raise NotReadError(f"{'.'.join(path)}: {error}", node.start_mark) from error

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict:
        values: dict = {}
        lines: dict[str, int] = {}
        for key_node, value_node in _shared(node.value) if path == ("placement",) else node.value:
            line = key_node.start_mark.line + 1
            for name in self._names(key_node, path):
                if name in values:
                    key = ".".join((*path, name))
                    self.errors.append(f"{self.where(line)}: {key}: set twice, first on line {lines[name]}; remove one")
                    continue
                values[name] = self.value(value_node, (*path, name))
                self.origins[(*path, name)] = self.where(line)
                lines[name] = line
        return values

    def _names(self, node: yaml.Node, path: KeyPath) -> list[str]:
        if not isinstance(node, yaml.ScalarNode) or not _is_name(node.value):
            raise NotReadError(NO_NAME, node.start_mark)
        if node.value == "<<":
            raise NotReadError("merge keys (<<) are not read; use base:", node.start_mark)
        return _split(node.value) if path == ("placement",) else [node.value]


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def _shared(pairs: list[tuple[yaml.Node, yaml.Node]]) -> list[tuple[yaml.Node, yaml.Node]]:
    """`{actor, critic: 0-7}` with 0-7 for both: to YAML a name before a comma is a key of its own, without a value.

    What has a colon and nothing behind it stays null.
    """
    shared: list[tuple[yaml.Node, yaml.Node]] = []
    for key, value in reversed(pairs):
        has_colon = not _is_null(value) or value.end_mark.index > key.end_mark.index
        shared.insert(0, (key, value if has_colon or not shared else shared[0][1]))
    return shared


def _is_name(text: str) -> bool:
    return 0 < len(text) <= LONGEST_KEY and text.isprintable()


def _split(key: str) -> list[str]:
    """`actor, critic` -> both names."""
    return [name.strip() for name in key.split(",")]


def _paths(path: KeyPath) -> Iterator[KeyPath]:
    """A key path, or in `placement` one for each component that shares the key."""
    if len(path) == 2 and path[0] == "placement":
        yield from (("placement", name) for name in _split(path[1]))
    else:
        yield path


def _nested(path: KeyPath, value: object) -> dict:
    """The value below its path, one nested dict a step."""
    if isinstance(value, dict) and not path:
        return value
    nested: dict = {}
    for full_path in _paths(path):
        below = nested
        for name in full_path[:-1]:
            below = below.setdefault(name, {})
        below[full_path[-1]] = value
    return nested


def _merged(below: dict, above: dict) -> dict:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
