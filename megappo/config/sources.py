"""Read a config's YAML with its `key=value` overrides, as nested dicts with the place where each key was written."""

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError

from megappo.config.config_error import ConfigError, shorten
from megappo.config.text_files import TextFileError, read_text
from megappo.config.values import FilePaths

LARGEST_FILE = 256 * 2**10
"""Bytes of a config; one with every key has 5 KiB."""
COMMAND_LINE = "command line"
FILE_PATHS = TypeAdapter(FilePaths)
MOST_VALUES = 2**16
"""Values of a config, including values that an alias (*name) repeats."""
UNCLOSED = "is not closed"
YAML_PROBLEMS = {
    "<block end>": "the line is not indented like those above it",
    "mapping values are not allowed": "a key follows a value: the indentation is wrong, or a text contains `: `",
    r"'\t' that cannot start": "a tab cannot indent: use spaces",
    "expected ',' or": UNCLOSED,
    "unexpected end of stream": UNCLOSED,
}
"""Part of PyYAML's message -> what is wrong."""
_TAG = "tag:yaml.org,2002:"
_KEYS = re.compile(r"^[a-z_]+(?=:)|[a-z_]+(?:\.[\w-]+)+")
"""Possible keys in the text of an error: a section only at its start, as its name may be a word like any other."""


class Place(NamedTuple):
    """The place where a key was written: `run.yaml:12` or `command line`, and the number of its file, or of all
    overrides."""

    source: int
    text: str


class _Loader(yaml.SafeLoader):
    """Loader that reads dates as text and refuses tags, 0100 and 1:30, which are 64 and 90 in YAML 1.1."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(problem="tags (!) are not supported: drop it", problem_mark=event.start_mark)
        try:
            return super().compose_node(parent, index)
        except RecursionError as error:
            raise yaml.MarkedYAMLError(problem="it is nested too deep", problem_mark=event.start_mark) from error


yaml.add_constructor(_TAG + "timestamp", yaml.SafeLoader.construct_yaml_str, _Loader)
yaml.add_constructor(_TAG + "int", lambda loader, node: _integer(node), _Loader)


def _integer(node: yaml.Node) -> int:
    try:
        return int(node.value, 0)
    except ValueError as error:
        raise yaml.MarkedYAMLError(
            problem=f"{node.value} is not a decimal number", problem_mark=node.start_mark
        ) from error


class Sources:
    """The files and overrides of a config, merged: what is read later overrides what was read before.

    Attributes:
        file: the config, for errors about keys that were not written anywhere.
        values: nested dicts.
        places: dotted key -> where it was written last.
        errors: keys that are written twice, and overrides that cannot be read, a line each.
    """

    def __init__(self, file: str = ""):
        self.file = file
        self.values: dict[str, Any] = {}
        self.places: dict[str, Place] = {}
        self.errors: list[str] = []
        self._num_files = 0

    def __eq__(self, other: object) -> bool:
        """Return True: equal configs may have been written in different places."""
        return isinstance(other, Sources)

    def read_file(self, path: Path, named_at: str = "", readers: tuple[str, ...] = ()) -> None:
        """Read the files that the `base:` of a YAML file names, relative to it, then the file itself.

        Args:
            named_at: start of an error: the place of the `base:` that names this file.
            readers: files whose `base:` led here.
        Raises:
            ConfigError: a file cannot be read, is not YAML, or holds something that no config needs.
        """
        try:
            text = read_text(path, LARGEST_FILE)
        except TextFileError as error:
            raise ConfigError(f"{named_at}{path}: {error}") from error
        real = os.path.realpath(path)
        if real in readers:
            raise ConfigError(f"{named_at}{path}: it is a base of itself: remove one")
        with _reporting(str(path)):
            loader = _Loader(text)
            node = loader.get_single_node()
            if node:
                _num_values(node, {})
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}:1: expected sections such as `model:`")
        for key, value in node.value:
            if key.value == "base":
                place = f"{path}:{key.start_mark.line + 1}: base: "
                for base in _bases(loader.construct_object(value, deep=True), place):
                    self.read_file(path.parent / base, f"{place}cannot read ", (*readers, real))
        node.value = [pair for pair in node.value if pair[0].value != "base"]
        with _reporting(str(path)):
            self._merge(loader, node, self.values, "", str(path))
        self._num_files += 1

    def read_override(self, text: str) -> None:
        """Read one `key=value` of the command line, the value written as in YAML. A + before it, Hydra's sign for a key
        that a config lacks, changes nothing."""
        key, equals, value = text.lstrip("+").partition("=")
        names = key.strip().split(".")
        advice = ""
        if text.startswith("~"):  # Hydra's sign for a key that a config should lose
            advice = "keys cannot be removed: set the key to its default, which megappo plan --keys lists"
        elif not equals or not key.isprintable() or not all(names):
            advice = "expected key=value, such as trainer.total_steps=10"
        if advice:
            self.errors.append(f"{COMMAND_LINE}: {shorten(repr(text))}: {advice}")
            return
        try:
            with _reporting(COMMAND_LINE):
                loader = _Loader(value)
                node = loader.get_single_node() or yaml.ScalarNode(_TAG + "null", "")
                _check_colons(node)
                _num_values(node, {})
                for name in reversed(names):
                    node = yaml.MappingNode(_TAG + "map", [(yaml.ScalarNode(_TAG + "str", name), node)])
                self._merge(loader, node, self.values, "", COMMAND_LINE)
        except ConfigError as error:
            self.errors.append(f"{error} (in {shorten(repr(text))})")

    def _merge(self, loader: _Loader, node: yaml.Node, values: dict[str, Any], path: str, source: str) -> None:
        """Merge a mapping into `values`, the section at `path`. Components share a key, as `actor, critic: 0-7`."""
        seen: dict[str, str] = {}
        shared = ""
        for key, value in node.value:
            place = source if source == COMMAND_LINE else f"{source}:{key.start_mark.line + 1}"
            written = f"{shared}{key.value}"
            shared = ""
            mark = value.start_mark
            if path == "placement." and getattr(node, "flow_style", False) and mark.buffer[mark.pointer] == ",":
                shared = f"{written},"  # of {actor, critic: 0-7}, in which actor has no value to YAML
                continue
            for name in written.split(",") if path == "placement." else [written]:
                name = name.strip()
                if name in seen:
                    self.errors.append(f"{place}: {path}{name}: set twice, first at {seen[name]}; remove one")
                    continue
                seen[name] = place
                self.places[path + name] = Place(self._num_files, place)
                if isinstance(value, yaml.MappingNode):
                    below = values.get(name)
                    values[name] = below if isinstance(below, dict) else {}
                    self._merge(loader, value, values[name], f"{path}{name}.", source)
                else:
                    values[name] = loader.construct_object(value, deep=True)
        if shared:
            self.errors.append(f"{place}: {path}{shared[:-1]} has no ranks: write {{actor, critic: 0-7}}")

    def place_of(self, key: str) -> str:
        """Return the place of a key, else of the section it would be in, else the file."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places[key].text if key else self.file

    def overrides(self, key: str, others: tuple[str, ...]) -> bool:
        """Return whether a source that overrides the one of `key` sets one of the others."""
        default = Place(-1, "")
        own = self.places.get(key, default)
        return any(self.places.get(other, default).source > own.source for other in others)

    def located(self, error: str) -> str:
        """Return the error after the place of the key to correct, else of the first written key, else the file."""
        named = _KEYS.findall(error)
        for key in sorted(named, key=lambda key: f"correct {key}" not in error):
            of_table = key.rpartition(".")[0] if key.startswith(("eval.datasets.", "teachers.")) else ""
            for name in (key, of_table):  # for eval.datasets.NAME.n the place of NAME
                if name in self.places:
                    return f"{self.places[name].text}: {error}"
        return f"{self.file}: {error}" if self.file else error


def _bases(value: object, place: str) -> tuple[str, ...]:
    try:
        return FILE_PATHS.validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{place}expected a path or a list of paths, found {shorten(repr(value))}") from error


def _num_values(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values in a node, each as often as aliases (*name) repeat it.

    Args:
        known: id of a node -> its number. A node that is in progress, and so within itself, has infinitely many.
    Raises:
        MarkedYAMLError: they are too many.
    """
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = chain.from_iterable(inner) if isinstance(node, yaml.MappingNode) else inner
        known[id(node)] = 1 + sum(_num_values(part, known) for part in parts)
        if known[id(node)] > MOST_VALUES:
            problem = f"with its aliases (*) it holds {known[id(node)]:,} values, more than {MOST_VALUES:,}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return known[id(node)]


def _check_colons(node: yaml.Node) -> None:
    """Refuse `{a:1}`, a mapping to Hydra, which to YAML has the key `a:1`."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    if any(":" in key.value and not value.value for key, value in pairs):
        raise ValueError("a key and its value have no space between them: write {key: value}")


@contextmanager
def _reporting(source: str) -> Iterator[None]:
    """Raise a ConfigError for text that is not YAML."""
    try:
        yield
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        problem = next((meaning for words, meaning in YAML_PROBLEMS.items() if words in problem), problem)
        start = getattr(error, "context_mark", None)
        if start and problem == UNCLOSED:
            mark = start
            problem = f"{start.buffer[start.pointer]} {UNCLOSED}"
        place = f"{source}:{mark.line + 1}" if mark and source != COMMAND_LINE else source
        remedy = "correct it, or quote what is text"
        raise ConfigError(f"{place}: not valid YAML: {problem}; {remedy}") from error
