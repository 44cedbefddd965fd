"""YAML file + `base:` + `key=value` overrides -> Config, or every error at once.

Relative paths in a `base:` are relative to the file that names them. All other paths (model.path, data files,
trainer.output_dir, reward files) are relative to the directory the program is started in.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megappo.config.bases import read_file
from megappo.config.coercion import EXPLAINED
from megappo.config.describe import NAME, REQUIRED, Key, declared, keys, nearest_key, nearest_word, show
from megappo.config.errors import MOST_ERRORS, ConfigError, shorten
from megappo.config.extensions import run_extensions
from megappo.config.origins import Origins
from megappo.config.reading import KeyPath, Layer, read_override
from megappo.config.schema import Config

SHOWN = (EXPLAINED, "less_than_equal")
"""Types of pydantic's errors whose texts say more than the expected values."""


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, before_extensions: Callable[[], None] | None = None
) -> Config:
    """Read a run's config. Whether its keys agree with each other is `trainer.preflight.check_run`'s to tell.

    Args:
        path: YAML file. `base:` in it names one file or a list, merged deeply below it.
        overrides: `key=value`, dotted keys, values written as in YAML; they win over files, later ones over earlier.
            Files of trainer.extensions are run first.
        before_extensions: called before such files are run, if there are any: what they import may need it.
    Raises:
        ConfigError: with everything wrong in files, overrides, key names and values.
    """
    layer = read_file(Path(path))
    for override in overrides:
        layer = read_override(override).over(layer)
    errors, origins = list(layer.errors), Origins(str(path), layer.origins)
    errors += map(origins.located, run_extensions(layer.values, before_extensions))
    keys.cache_clear()  # there may be more values to choose from now
    try:
        config = Config.written(layer.values, origins)
    except ValidationError as error:
        errors += _schema_errors(error, layer, origins)
    if errors:
        raise ConfigError(*errors)
    return config


def dump_config(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back equal."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def changes_since(file: Path, config: Config) -> list[str]:
    """`key: old -> new` of each key whose value differs from what `dump_config` wrote to a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    before = read_file(file)
    if before.errors:
        raise ConfigError(*before.errors)
    old, new = (dict(leaves(values)) for values in (before.values, config.model_dump(mode="json")))
    return [
        f"{key}: {show(old.get(key))} -> {show(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The dotted keys of nested sections, and their values."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _schema_errors(error: ValidationError, layer: Layer, origins: Origins) -> list[str]:
    """One line per wrong key; pydantic may report several for one value of a union or list."""
    known = {key.path: key for key in keys()}
    lines: dict[KeyPath, str] = {}
    for problem in error.errors(include_url=False, include_context=False):
        path = tuple(str(part) for part in problem["loc"])
        if len(lines) > MOST_ERRORS:  # finding the nearest of all keys takes its time
            break
        if problem["type"] == "missing" and declared(path) in known:  # a list too short misses an item, not a key
            lines.update(_missing(known, path, origins) if layer.complete else {})
        elif problem["type"] == "extra_forbidden":
            lines[path] = f"{origins.of(path)}: {'.'.join(path)}: unknown key; {nearest_key('.'.join(path))}"
        elif (path := _key_path(known, path)) not in lines or problem["type"] in SHOWN:
            key, value = known[declared(path)], _at(layer.values, path)
            why = f" ({problem['msg']})" if problem["type"] in SHOWN else ""
            found = shorten(show(value)) + why + nearest_word(key, value)
            lines[path] = f"{origins.of(path)}: {'.'.join(path)}: expected {key.values}, found {found}"
    return list(lines.values())


def _missing(known: dict[str, Key], path: KeyPath, origins: Origins) -> dict[KeyPath, str]:
    """Of a missing section, the keys in it that have no default."""
    section = declared(path)
    required = [
        key
        for key in known.values()
        if key.default is REQUIRED and not key.section and f"{key.path}.".startswith(f"{section}.")
    ]
    named = {key: key.path.replace(section, ".".join(path)) for key in required}
    place = origins.of(path[:-1]) if NAME in section.split(".") else origins.file
    return {tuple(name.split(".")): f"{place}: {name}: must be set ({key.description})" for key, name in named.items()}


def _key_path(known: dict[str, Key], path: KeyPath) -> KeyPath:
    """The key an error belongs to: pydantic goes on into list items and union members."""
    while declared(path) not in known:
        path = path[:-1]
    return path


def _at(values: Any, path: KeyPath) -> object:
    for name in path:
        values = values[name]
    return values
