"""YAML text -> nested dicts that remember where each key was written. Knows nothing of the schema's types."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from megappo.config.errors import ConfigError

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """Keys from one or several merged sources.

    Attributes:
        values: nested dicts.
        origins: where a key was written, such as `run.yaml:12`.
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
            below.origins | self.origins,
            below.errors + self.errors,
            below.complete and self.complete,
        )


def read_file(path: Path, readers: tuple[Path, ...] = ()) -> Layer:
    """A YAML file over the files its `base:` names (relative to it; of several, later ones win).

    Args:
        readers: the files whose `base:` led here, outermost first.
    """
    readers = (*readers, path)
    if path.resolve() in {reader.resolve() for reader in readers[:-1]}:
        return _unreadable(f"{readers[-2]}: base: goes round in circles: {' -> '.join(map(str, readers))}")
    try:
        layer = parse(path.read_text("utf-8"), (), lambda line: f"{path}:{line}")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        return _unreadable(f"{readers[-2]}: base: cannot read {path}: {reason}" if readers[1:] else f"{path}: {reason}")
    except ConfigError as error:
        return _unreadable(*error.errors)
    bases = layer.values.pop("base", [])
    if not isinstance(bases, str | list) or not all(isinstance(base, str) for base in bases):
        return _unreadable(f"{path}: base: expected a path or a list of paths, found {bases!r}")
    below = Layer({})
    for base in [bases] if isinstance(bases, str) else bases:
        below = read_file(path.parent / base, readers).over(below)
    return layer.over(below)


def read_override(text: str) -> Layer:
    """One `key=value` of the command line, the value written as in YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        return Layer({}, errors=(f"command line: {text!r}: expected key=value, such as trainer.total_steps=10",))
    try:
        return parse(value, tuple(key.strip().split(".")), lambda line: "command line")
    except ConfigError as error:
        return Layer({}, errors=tuple(f"{line} (in {text!r})" for line in error.errors))


def parse(text: str, path: KeyPath, where: Callable[[int], str]) -> Layer:
    """YAML text as the value of `path`; () for a whole document, which must be a mapping.

    Args:
        where: how an error names a line of the text, counted from 1.
    Raises:
        ConfigError: the text is not YAML, or not a mapping where it must be.
    """
    loader = yaml.SafeLoader(text)
    try:
        reader = _Reader(loader, where)
        value = reader.value(loader.get_single_node(), path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError([f"{where(mark.line + 1 if mark else 1)}: not valid YAML: {problem}"]) from error
    finally:
        loader.dispose()
    if not path and not isinstance(value, dict):
        found = "nothing" if value is None else repr(value)
        raise ConfigError([f"{where(1)}: expected sections such as `model:`, found {found}"])
    above = {full_path[:end]: where(1) for full_path in _paths(path) for end in range(1, len(full_path) + 1)}
    return Layer(_nested(path, value), above | reader.origins, tuple(reader.errors))


class _Reader:
    """Builds values from YAML nodes; `yaml.safe_load` would keep the last of two equal keys and forget the lines."""

    def __init__(self, loader: yaml.SafeLoader, where: Callable[[int], str]):
        self.loader = loader
        self.where = where
        self.origins: dict[KeyPath, str] = {}
        self.errors: list[str] = []
        self._open: list[yaml.Node] = []

    def value(self, node: yaml.Node | None, path: KeyPath) -> object:
        if node is None:
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        value = self.loader.construct_object(node, deep=True)
        is_text = isinstance(node, yaml.ScalarNode) and value is not None
        # Ranks are read as written: YAML takes 010 for 8 and 1:30 for 90.
        return node.value if is_text and path[:1] == ("placement",) else value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict:
        if any(node is other for other in self._open):
            raise _not_read("an alias refers to what holds it", node)
        self._open.append(node)
        values: dict = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            for name in self._names(key_node, path):
                if name in values:
                    key = ".".join((*path, name))
                    self.errors.append(f"{self.where(line)}: {key}: set twice, first on line {lines[name]}; remove one")
                    continue
                values[name] = self.value(value_node, (*path, name))
                self.origins[(*path, name)] = self.where(line)
                lines[name] = line
        self._open.pop()
        return values

    def _names(self, node: yaml.Node, path: KeyPath) -> list[str]:
        if not isinstance(node, yaml.ScalarNode):
            raise _not_read("a key must be a name", node)
        if node.value == "<<":
            raise _not_read("merge keys (<<) are not read; use base:", node)
        return _split(node.value) if path == ("placement",) else [node.value]


def _not_read(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


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


def _unreadable(*errors: str) -> Layer:
    return Layer({}, errors=errors, complete=False)
