"""YAML file + `base:` + `key=value` overrides -> Config, or every error at once.

Relative paths in a `base:` are relative to the file that names them. All other paths (model.path, data files,
trainer.output_dir, reward files) are relative to the directory the program is started in.
"""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megappo.config.config_error import MOST_ERRORS, ConfigError, shorten, show
from megappo.config.describe import declared, keys, nearest_key
from megappo.config.elsewhere import key_advice, value_advice
from megappo.config.schema import Config
from megappo.config.sources import FILE_PATHS, Sources
from megappo.config.values import EXPLAINED
from megappo.user_modules import import_file, share_all

MISSPELT = 0.95
"""Similarity above which a key is taken for a misspelt one of ours, not for another system's."""
FOREIGN = 5
"""Keys of another system from which a script was probably copied."""
EXAMPLES = {"eval.datasets": "{files: val.jsonl}", "teachers": "{model_path: FOLDER}"}
"""Table of sections that users name -> an example of one."""
REQUIRED_SECTIONS = tuple(name for name, field in Config.model_fields.items() if field.is_required())


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, before_extensions: Callable[[], None] | None = None
) -> Config:
    """Read a run's config. `lab.plan.run_checks.check_run` checks whether its keys agree with each other.

    Args:
        path: YAML file. `base:` in it names one file or a list, merged deeply below it.
        overrides: `key=value`, dotted keys, values written as in YAML; they win over files, later ones over earlier.
            Files of trainer.extensions are run first.
        before_extensions: called before such files are run, if there are any: what they import may need it.
    Raises:
        ConfigError: with everything wrong in overrides, key names and values; or the first file that is not YAML.
    """
    sources = _read(Path(path), overrides)
    errors = [*sources.errors, *map(sources.located, run_extensions(sources.values, before_extensions))]
    keys.cache_clear()  # an extension may have added values to choose from
    try:
        values: dict[str, Any] = {name: {} for name in REQUIRED_SECTIONS}
        config = Config.model_validate(values | sources.values, context=sources)
    except ValidationError as error:
        errors += _schema_errors(error, sources)
    if errors:
        raise ConfigError(*dict.fromkeys(errors))  # a file may be the base of several
    return config


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML that `load_config` reads back equal."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def read_values(file: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the values that a YAML file, its bases and overrides hold, unchecked.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    return _read(file, overrides).values


def _read(path: Path, overrides: Iterable[str]) -> Sources:
    sources = Sources(str(path))
    sources.read_file(path)
    for override in overrides:
        sources.read_override(override)
    return sources


def changes_since(file: Path, config: Config) -> list[str]:
    """Return `key: old -> new` for each key whose value differs from the one that `dump_config` wrote to a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    old = dict(leaves(read_values(file)))
    new = dict(leaves(config.model_dump(mode="json")))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    return [f"{key}: {show(old.get(key))} -> {show(new.get(key))}" for key in changed]


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted keys of nested sections, and their values."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys and their values as nested sections: what `leaves` takes apart."""
    sections: dict[str, Any] = {}
    for key, value in values.items():
        *names, last = key.split(".")
        section = sections
        for name in names:
            section = section.setdefault(name, {})
        section[last] = value
    return sections


def run_extensions(values: Mapping[str, Any], before: Callable[[], None] | None = None) -> list[str]:
    """Run the files of trainer.extensions, each once in a process, and return their errors, one line each.

    Args:
        values: values of a whole config. Values of a wrong type are left to the schema.
        before: called once before the first file.
    """
    trainer = values.get("trainer")
    try:
        files = FILE_PATHS.validate_python(trainer.get("extensions", ()) if isinstance(trainer, dict) else ())
    except ValidationError:
        return []
    if files and before:
        before()
    errors = []
    for file in files:
        path = str(Path(file).resolve())
        try:
            import_file(path)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too, and exceptions that libraries keep from `except Exception`
            text = traceback.format_exception_only(error)[-1].strip()
            frames = traceback.extract_tb(error.__traceback__)
            lines = [getattr(error, "lineno", None), *(frame.lineno for frame in frames if frame.filename == path)]
            where = f" (line {lines[-1]})" if lines[-1] else ""
            errors.append(f"trainer.extensions: {file} raised {shorten(text)}{where}: correct the file")
    share_all()
    return errors


def _schema_errors(error: ValidationError, sources: Sources) -> list[str]:
    """Return one line per wrong key; pydantic may report several for one value of a union or list."""
    known = {key.path: key for key in keys()}
    lines: dict[str, str] = {}
    systems: Counter[str] = Counter()
    for problem in error.errors(include_url=False, include_context=False):
        path = ".".join(map(str, problem["loc"]))
        kind = problem["type"]
        if len(lines) > MOST_ERRORS:  # they are counted, and advice takes time
            lines.setdefault(path, path)
            continue
        if kind == "extra_forbidden" or not path:  # a key that is not text has no path
            lines |= _unknown_keys(path, problem["input"], systems)
            continue
        if kind == "missing" and declared(path) in known:  # a list too short misses an item, not a key
            lines[path] = f"{path}: must be set ({known[declared(path)].meaning})"
            continue
        inner = path
        while declared(path) not in known:  # pydantic's path leads into list items and union members
            path = path.rpartition(".")[0]
        values = known[declared(path)].values
        if path in EXAMPLES and path != inner:
            values = f"section such as {EXAMPLES[path]}"
            path = inner
        reason = f" ({problem['msg']})" if kind == EXPLAINED else value_advice(path, problem["input"])
        if path not in lines or reason:
            written = shorten(show(problem["input"]))
            lines[path] = f"{path}: expected {values}, found {written}{reason}"
    hints = []
    for system, count in systems.items():
        if system and count >= FOREIGN:
            hints.append(
                f"{sources.file}: {count} keys are of {system}: write ours, or translate the script: megappo import "
                f"{system} SCRIPT"
            )
    return hints + [f"{sources.place_of(path)}: {line}" for path, line in lines.items()]


def _unknown_keys(path: str, value: object, systems: Counter[str]) -> dict[str, str]:
    """Return an error about an unknown key, or about each key below it that is another system's; count those."""
    sections = {key.path for key in keys() if key.section}
    known = [key.path for key in keys()]
    advice = {}
    for key, written in leaves({path: value}) if path else ():
        is_misspelt = get_close_matches(key, known, 1, MISSPELT)
        system, advice[key] = ("", "") if is_misspelt else key_advice(key, written, sections)
        systems[system] += 1
    if not any(advice.values()):
        return {path: f"{path}: unknown key; {nearest_key(path)}"}
    return {key: f"{key}: unknown key; {text or nearest_key(key)}" for key, text in advice.items()}
