"""Keys of the schema as text: for `megappo plan --keys` and for error messages."""

import difflib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from os.path import commonprefix
from typing import Any, get_args, get_origin

import yaml
from pydantic_core import PydanticUndefined

from megappo.config.config_error import ConfigError, show
from megappo.config.schema import Config
from megappo.config.values import Section

WIDTH = 120
INDENT = " " * 6
WORDS = {"boolean": "true | false", "string": "text", "integer": "int", "number": "float", "null": "null"}
INTRO = (
    "CONFIG is a YAML file of these keys; key=value on the command line overrides one, such as "
    "actor.optim.lr=1e-6. `base: OTHER.yaml` (a path or a list, relative to the file) in CONFIG inherits the "
    "keys of OTHER.yaml. All other paths are relative to the current directory."
)
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Key:
    """One key of the schema.

    Attributes:
        path: dotted, as an override writes it; with NAME for a name that the user gives, as eval.datasets.NAME.n.
        values: its possible values, in words.
        default: PydanticUndefined if there is none.
        section: the type of the keys below it; None for a plain value.
    """

    path: str
    values: str
    default: object
    meaning: str
    section: type[Section] | None


@cache
def keys() -> tuple[Key, ...]:
    """Return every key, a section before the keys in it, in the schema's order."""
    return tuple(_keys(Config, ""))


def _keys(model: type[Section], prefix: str) -> Iterator[Key]:
    schema = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        path = prefix + name
        section = _section_in(field.annotation)
        yield Key(path, describe(schema[name]), field.default, field.description or "", section)
        if section:
            is_table = get_origin(field.annotation) is dict
            yield from _keys(section, f"{path}.NAME." if is_table else f"{path}.")


def _section_in(annotation: object) -> type[Section] | None:
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def declared(path: str) -> str:
    """Return a key as the schema has it: with NAME for a name that the user has given."""
    return re.sub(r"^(eval\.datasets|teachers)\.[^.]+", r"\1.NAME", path)


def nearest_key(path: str) -> str:
    """Return advice about an unknown key: the keys probably meant, else the keys of its section."""
    known = [key.path for key in keys()]
    section, _, name = path.rpartition(".")
    if path in known:  # written with its dots, as a key of a YAML file
        return f"dots are for the command line; here nest it: {section}: {{{name}: ...}}"
    siblings = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == declared(section)]
    close = [f"{section}.{one}".lstrip(".") for one in difflib.get_close_matches(name, siblings, 2)]
    same_name = [key for key in known if key.endswith(f".{name}")]
    nested = [key for key in same_name if key.startswith(path.partition(".")[0] + ".")]
    longer = [key for key in close if key.endswith(f"_{name}")]
    if meant := longer or nested or close or same_name:
        return f"did you mean {' or '.join(meant[:2])}?"
    return f"{section or 'the top level'} has {', '.join(siblings)}"


def describe(schema: dict[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words: `int >= 1`, `k1 | abs`, `float > 0 | null`."""
    if "anyOf" in schema:
        return " | ".join(map(describe, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " | ".join(map(str, schema.get("enum") or [schema["const"]]))
    if "$ref" in schema:
        return "section"
    if "prefixItems" in schema:
        items = schema["prefixItems"]
        return f"list of {len(items)}: each {describe(items[0])}"
    if "items" in schema:
        item = describe(schema["items"])
        count = "non-empty " if "minItems" in schema else ""
        return f"{count}list of ({item})" if " | " in item else f"{count}list of {item}"
    if "additionalProperties" in schema:
        values = schema["additionalProperties"]
        return "keys with " + ("any value" if values is True else describe(values))
    limits = [f" {sign} {schema[name]:g}" for name, sign in LIMITS.items() if name in schema]
    return WORDS[schema["type"]] + " and".join(limits)


def yaml_lines(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a YAML config that sets dotted keys, one line each, with its key; "" for lines of sections."""
    above: list[str] = []
    for key, value in values.items():
        *sections, name = key.split(".")
        for depth in range(len(commonprefix([above, sections])), len(sections)):
            yield "", f"{'  ' * depth}{sections[depth]}:"
        above = sections
        text = yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).partition("\n")[0]
        yield key, f"{'  ' * len(sections)}{name}: {text}"


def config_help(word: str = "") -> str:
    """Return the keys of the YAML with their values, defaults and meanings: all, or the keys with a word in their
    names; if there are none, the keys with it in their meanings.

    Raises:
        ConfigError: no key has the word.
    """
    chosen = [key for key in keys() if word in key.path] or [key for key in keys() if word in key.meaning]
    if not chosen:
        raise ConfigError(f"no key has {word!r} in its name or meaning: {nearest_key(word)}")
    lines = [] if word else [textwrap.fill(INTRO, WIDTH)]
    for key in chosen:
        if "." not in key.path:
            lines.append(f"\n{key.path}: {key.meaning}")
            continue
        is_required = key.default is PydanticUndefined
        default = "required" if is_required else f"default {show(key.default)}"
        declaration = f"  {key.path}: {key.values}" + ("" if key.section and key.default else f", {default}")
        lines.append(textwrap.fill(declaration, WIDTH, subsequent_indent=INDENT))
        lines.append(textwrap.fill(key.meaning, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT))
    return "\n".join(lines)
