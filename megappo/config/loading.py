"""YAML file + `base:` + `key=value` overrides -> Config, or every error at once.

Relative paths in a `base:` are relative to the file that names them. All other paths (model.path, data files,
trainer.output_dir, reward files) are relative to the directory the program is started in.
"""

import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megappo.config.config_error import MOST_ERRORS, ConfigError, looked_in, shorten, show
from megappo.config.describe import declared, keys, nearest_key, nearest_word
from megappo.config.layers import KeyPath, Layer, Origins, read_file, read_override
from megappo.config.schema import Config
from megappo.config.values import EXPLAINED, FilePaths
from megappo.user_modules import home_of, share_all

SHOWN = (EXPLAINED, "less_than_equal")
"""Types of pydantic's errors whose texts add to the expected values."""
REQUIRED_SECTIONS: tuple[str, ...] = tuple(name for name, field in Config.model_fields.items() if field.is_required())


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, before_extensions: Callable[[], None] | None = None
) -> Config:
    """Read a run's config. `preflight.arrangement.check_run` checks whether its keys agree with each other.

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
    origins = Origins(str(path), layer.places)
    errors = [*layer.errors, *map(origins.located, run_extensions(layer.values, before_extensions))]
    keys.cache_clear()  # an extension may have added values to choose from
    try:
        values: dict[str, Any] = {name: {} for name in REQUIRED_SECTIONS}
        config = Config.written(values | layer.values, origins)
    except ValidationError as error:
        errors += _schema_errors(error, layer, origins)
    if errors:
        raise ConfigError(*dict.fromkeys(errors))  # a file may be the base of several
    return config


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML that `load_config` reads back equal."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def changes_since(file: Path, config: Config) -> list[str]:
    """Return `key: old -> new` for each key whose value differs from the one that `dump_config` wrote to a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    before = read_file(file)
    if before.errors:
        raise ConfigError(*before.errors)
    old, new = dict(leaves(before.values)), dict(leaves(config.model_dump(mode="json")))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    return [f"{key}: {show(old.get(key))} -> {show(new.get(key))}" for key in changed]


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted keys of nested sections, and their values."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def run_extensions(values: Mapping[str, Any], before: Callable[[], None] | None = None) -> list[str]:
    """Run the files of trainer.extensions, each once in a process, and return their errors, one line each.

    Args:
        values: of a whole config. Values of a wrong type are left to the schema.
        before: called once before the first file.
    """
    trainer = values.get("trainer")
    given = trainer.get("extensions", ()) if isinstance(trainer, dict) else ()
    try:
        files = TypeAdapter(FilePaths).validate_python(given)
    except ValidationError:
        return []
    if files and before:
        before()
    errors = []
    for file in files:
        if not Path(file).is_file():
            errors.append(
                f"trainer.extensions: no file {shorten(file)}{looked_in(file)}: create it or correct the path"
            )
            continue
        path = str(Path(file).resolve())
        try:
            _run(path)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too, and exceptions that libraries keep from `except Exception`
            text = traceback.format_exception_only(error)[-1].strip()
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
            where = f" (line {lines[-1]})" if lines else ""
            errors.append(f"trainer.extensions: {file} raised {shorten(text)}{where}: correct the file")
    share_all()
    return errors


@functools.cache
def _run(path: str) -> None:
    """Import a file, with the modules of its folder in place of another's."""
    if not path.endswith(".py"):
        raise ImportError(f"{Path(path).name} is no Python file")
    home = home_of(str(Path(path).parent))
    home.enter()
    home.load(path)


def _schema_errors(error: ValidationError, layer: Layer, origins: Origins) -> list[str]:
    """Return one line per wrong key; pydantic may report several for one value of a union or list."""
    known = {key.path: key for key in keys()}
    lines: dict[KeyPath, str] = {}
    for problem in error.errors(include_url=False, include_context=False):
        path = tuple(str(part) for part in problem["loc"])
        dotted = ".".join(path)
        if len(lines) > MOST_ERRORS:
            break
        if problem["type"] == "extra_forbidden":
            lines[path] = f"{origins.of(path)}: {dotted}: unknown key; {nearest_key(dotted)}"
            continue
        if problem["type"] == "missing" and declared(path) in known:  # a list too short misses an item, not a key
            place = origins.of(path[:-1]) if len(path) > 2 else origins.file
            if layer.is_complete:
                lines[path] = f"{place}: {dotted}: must be set ({known[declared(path)].meaning})"
            continue
        while declared(path) not in known:  # pydantic goes on into list items and union members
            path = path[:-1]
        is_shown = problem["type"] in SHOWN
        if path not in lines or is_shown:
            key, value = known[declared(path)], _at(layer.values, path)
            found = shorten(show(value)) + (f" ({problem['msg']})" if is_shown else "") + nearest_word(key, value)
            lines[path] = f"{origins.of(path)}: {'.'.join(path)}: expected {key.values}, found {found}"
    return list(lines.values())


def _at(values: Any, path: KeyPath) -> object:
    for name in path:
        values = values[name]
    return values
