"""YAML files and `key=value` overrides -> nested dicts that know where each key was written."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic_core import PydanticCustomError

from megappo.config.config_error import ConfigError, shorten
from megappo.config.text_files import TextFileError, read_text
from megappo.config.values import as_path

KeyPath = tuple[str, ...]
LARGEST_FILE = 256 * 2**10
"""Bytes of a config; one with every key has 5 KiB."""
MOST_NODES = 5_000
"""Keys and values of one document; an alias counts as all that it stands for."""
LONGEST_KEY = 1000  # some are paths
LONGEST_NUMBER = 100
"""Characters. Python refuses to print an int of thousands of digits."""
NO_NAME = f"a key must be a name of 1 to {LONGEST_KEY} printable characters"
COMMAND_LINE = "command line"
PLACEMENT = ("placement",)

_TAG = "tag:yaml.org,2002:"
NULL, STR, MAP, INT, FLOAT = (_TAG + kind for kind in ("null", "str", "map", "int", "float"))
READ_TAGS = {NULL, STR, MAP, INT, FLOAT, _TAG + "bool", _TAG + "seq"}
_KEYS = re.compile(r"^[a-z_]+(?=:)|[a-z_]+(?:\.[\w-]+)+")
"""Possible keys in the text of an error: a section only at its start, as its name may be a word like any other."""


@dataclass(frozen=True)
class Origins:
    """Places where keys were written. Ignored when configs are compared.

    Attributes:
        file: the config; "" if there is none.
        places: key -> `run.yaml:12` or `command line`, without keys at their defaults. The winning source comes first:
            the command line, then the file, then its bases.
    """

    file: str = field(default="", compare=False)
    places: Mapping[KeyPath, str] = field(default_factory=dict, compare=False)

    def of(self, path: KeyPath) -> str:
        """Return the place of a key, else of the section it would be in, else the file."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.file)

    def rank(self, key: str) -> int:
        """Return the precedence of the source that set a key: 0 wins, the largest stands for no source."""
        sources = [place.rpartition(":")[0] for place in self.places.values()]
        place = self.places.get(tuple(key.split(".")))
        return len(sources) if place is None else sources.index(place.rpartition(":")[0])

    def located(self, error: str) -> str:
        """Return the error behind the place of the first key it names that was written, else behind the file."""
        named = [tuple(key.split(".")) for key in _KEYS.findall(error)]
        named += [path[:-1] for path in named if len(path) > 3]  # for eval.datasets.NAME.n the one of NAME
        place = next((self.places[path] for path in named if path in self.places), self.file)
        return f"{place}: {error}" if place else error


@dataclass(frozen=True)
class Layer:
    """Keys from one or several merged sources.

    Attributes:
        values: nested dicts.
        places: as in `Origins`.
        errors: faults of the text, one line each.
        is_complete: False if a source could not be read at all, so that keys may be missing for that reason.
    """

    values: dict
    places: dict[KeyPath, str] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    is_complete: bool = True

    def over(self, below: "Layer") -> "Layer":
        """Return both merged deeply; where they disagree this one wins."""
        hidden = {path: place for path, place in below.places.items() if path not in self.places}
        values = _merged(below.values, self.values)
        return Layer(values, self.places | hidden, below.errors + self.errors, self.is_complete and below.is_complete)


def read_file(path: Path, readers: tuple[Path, ...] = (), named_at: str = "") -> Layer:
    """Read a YAML file over the files that its `base:` names (relative to it; of several, later ones win).

    Args:
        readers: files whose `base:` led here, outermost first.
        named_at: place of the last such `base:`.
    """
    if os.path.realpath(path) in map(os.path.realpath, readers):
        circle = " -> ".join(map(str, (*readers, path)))
        return _unreadable(f"{named_at}: base: goes round in circles: {circle}: remove one")
    try:
        layer = parse(read_text(path, LARGEST_FILE), str(path))
    except TextFileError as error:
        return _unreadable(f"{named_at}: base: cannot read {path}: {error}" if readers else f"{path}: {error}")
    except ConfigError as error:
        return _unreadable(*error.errors)
    named_at = layer.places.get(("base",), str(path))
    bases = layer.values.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) and base.isprintable() for base in bases):
        return _unreadable(f"{named_at}: base: expected a path or a list of paths, found {shorten(repr(bases))}")
    below = Layer({})
    for base in bases:
        try:
            file = path.parent / as_path(base)
        except PydanticCustomError as error:
            return _unreadable(f"{named_at}: base: expected a path, found {shorten(repr(base))} ({error})")
        below = read_file(file, (*readers, path), named_at).over(below)
    return layer.over(below)


def read_override(text: str) -> Layer:
    """Read one `key=value` of the command line, the value written as in YAML."""
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    shown = shorten(repr(text))
    if not equals or not key.strip():
        return Layer({}, errors=(f"{COMMAND_LINE}: {shown}: expected key=value, such as trainer.total_steps=10",))
    if not all(map(_is_name, path)):
        return Layer({}, errors=(f"{COMMAND_LINE}: {shown}: {NO_NAME}",))
    try:
        return parse(value, COMMAND_LINE, path)
    except ConfigError as error:
        return Layer({}, errors=tuple(f"{line} (in {shown})" for line in error.errors))


def parse(text: str, source: str, path: KeyPath = ()) -> Layer:
    """Parse YAML text as the value of `path`; () for a whole document, which must be a mapping.

    Args:
        source: file, or COMMAND_LINE, for errors.
    Raises:
        ConfigError: the text is not YAML, not a mapping where it must be, or holds something that no config needs.
    """
    try:
        reader = _Reader(text, source)
        node = reader.loader.get_single_node()
        if path:
            node = _nested(node, path)
        values = reader.value(node, ()) if node else None
    except yaml.reader.ReaderError as error:
        place = _place(source, text.count("\n", 0, error.position))
        found = f"the character {chr(error.character)!r}"
        raise ConfigError(f"{place}: not valid YAML: {found} is not allowed: remove it") from error
    except yaml.MarkedYAMLError as error:
        place = _place(source, error.problem_mark.line if error.problem_mark else 0)
        if isinstance(error, NotReadError):
            raise ConfigError(f"{place}: {error.problem}") from error
        problem = ", ".join(filter(None, [error.context, error.problem]))
        raise ConfigError(f"{place}: not valid YAML: {problem}; correct it, or quote what is text") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: it nests too deeply, or an alias holds itself: write out the value") from error
    if not isinstance(values, dict):
        found = "nothing" if values is None else shorten(repr(values))
        raise ConfigError(f"{_place(source, 0)}: expected sections such as `model:`, found {found}")
    return Layer(values, reader.places, tuple(reader.errors))


class NotReadError(yaml.MarkedYAMLError):
    """Valid YAML that a config may not hold."""

    def __init__(self, problem: str, node: yaml.Node):
        super().__init__(problem=problem, problem_mark=node.start_mark)


class _Loader(yaml.SafeLoader):
    """A loader that takes dates and `=` for text."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in READ_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Reader:
    """Builds values from YAML nodes; `yaml.safe_load` would keep the last of two equal keys and forget the lines."""

    def __init__(self, text: str, source: str):
        self.loader = _Loader(text)
        self.source = source
        self.places: dict[KeyPath, str] = {}
        self.errors: list[str] = []
        self._num_nodes = 0

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        self._num_nodes += 1
        if self._num_nodes > MOST_NODES:
            found = f"more than {MOST_NODES:,} keys and values, aliases written out"
            raise NotReadError(f"{found}: is it the right file?", node)
        if node.tag not in READ_TAGS:
            raise NotReadError("tags (! or !!) are not read: leave it out, and quote what is text", node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(number))) for number, item in enumerate(node.value)]
        is_ranks = len(path) == 2 and path[:1] == PLACEMENT and node.tag != NULL
        if is_ranks:  # as written: YAML reads 010 as 8 and 1:30 as 90
            return node.value
        return self._scalar(node, path)

    def _scalar(self, node: yaml.Node, path: KeyPath) -> object:
        try:
            if node.tag in (INT, FLOAT) and len(node.value) > LONGEST_NUMBER:
                raise ValueError(f"a number of {len(node.value):,} characters")
            node.value.encode()  # raises for an escaped surrogate, which no file can hold
            return self.loader.construct_object(node)
        except (ValueError, OverflowError) as error:  # of a text such as 0x_, too
            raise NotReadError(f"{'.'.join(path)}: {error}: correct it, or quote it", node) from error

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict:
        values: dict = {}
        for name, key, value in self._pairs(node, path):
            full_path, place = (*path, name), _place(self.source, key.start_mark.line)
            if name in values:
                first = self.places[full_path].rpartition(":")[2]
                self.errors.append(f"{place}: {'.'.join(full_path)}: set twice, first on line {first}; remove one")
                continue
            self.places[full_path] = place
            values[name] = self.value(value, full_path)
        return values

    def _pairs(self, node: yaml.MappingNode, path: KeyPath) -> list[tuple[str, yaml.Node, yaml.Node]]:
        """Return name, key and value of each entry. Components share a key, as `actor, critic: 0-7` in `placement`.

        In `{actor, critic: 0-7}` YAML takes a name before a comma for a key without a value; it gets the next key's. A
        key with a colon and no value stays null.
        """
        pairs: list[tuple[str, yaml.Node, yaml.Node]] = []
        shared: yaml.Node | None = None
        for key, value in reversed(node.value):
            if not isinstance(key, yaml.ScalarNode) or not _is_name(key.value):
                raise NotReadError(NO_NAME, key)
            if key.value == "<<":
                raise NotReadError("merge keys (<<) are not read; use base:", key)
            names = [key.value]
            if path == PLACEMENT:
                has_colon = value.tag != NULL or value.end_mark.index > key.end_mark.index
                value = shared if shared and not has_colon else value
                names, shared = [name.strip() for name in key.value.split(",")], value
            pairs += [(name, key, value) for name in reversed(names)]
        return pairs[::-1]


def _place(source: str, line: int) -> str:
    return source if source == COMMAND_LINE else f"{source}:{line + 1}"


def _nested(node: yaml.Node | None, path: KeyPath) -> yaml.Node:
    """Return the node below one mapping for each name of the path."""
    start = yaml.Mark("", 0, 0, 0, None, 0)
    node = node or yaml.ScalarNode(NULL, "", start, start)
    for name in reversed(path):
        node = yaml.MappingNode(MAP, [(yaml.ScalarNode(STR, name, start, start), node)], start, start)
    return node


def _unreadable(*errors: str) -> Layer:
    return Layer({}, errors=errors, is_complete=False)


def _is_name(text: str) -> bool:
    return 0 < len(text) <= LONGEST_KEY and text.isprintable()


def _merged(below: dict, above: dict) -> dict:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
