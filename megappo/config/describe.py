"""Keys of the schema as text: for `--help` and for error messages."""

import argparse
import difflib
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from megappo.config.config_error import show
from megappo.config.schema import Config
from megappo.config.section import Section

REQUIRED = PydanticUndefined
"""`Key.default` of a key that must be set."""
NAME = "NAME"
"""Stands in a key for a name that the user gives, as in eval.datasets.NAME.n."""
UNREACHED = 10**6
"""Limits of at least this much exclude nothing that a machine has memory for; only errors show them."""
WIDEST_VALUES = 46
"""Characters of the help's column of values."""
WORDS = {"boolean": "true | false", "string": "text", "integer": "int", "number": "float", "null": "null"}
LIMITS = (
    ("minimum", ">=", "["),
    ("exclusiveMinimum", ">", "("),
    ("maximum", "<=", "]"),
    ("exclusiveMaximum", "<", ")"),
)


@dataclass(frozen=True)
class Key:
    """One key of the schema.

    Attributes:
        path: dotted, as an override writes it.
        values: its possible values, in words.
        default: REQUIRED if there is none.
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
        path, section = prefix + name, _section_in(field.annotation)
        is_table = get_origin(field.annotation) is dict
        own = None if is_table else section
        yield Key(path, describe(schema[name]), field.default, field.description or "", own)
        if section and is_table:
            path += f".{NAME}"
            yield Key(path, "section", REQUIRED, section.__doc__ or "", section)
        if section:
            yield from _keys(section, f"{path}.")


def _section_in(annotation: object) -> type[Section] | None:
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def declared(path: Sequence[str]) -> str:
    """Return a key as the schema has it: with NAME for a name that the user has given."""
    known, found = {key.path for key in keys()}, ""
    for name in path:
        above = f"{found}." if found else ""
        found = above + (NAME if above + NAME in known else name)
    return found


def nearest_key(path: str) -> str:
    """Return advice about an unknown key: the key probably meant, else the keys of its section."""
    known = [key.path for key in keys()]
    section, _, name = path.rpartition(".")
    if path in known:  # written with its dots, as a key of a YAML file
        return f"dots are for the command line; here nest it: {section}: {{{name}: ...}}"
    above = declared(section.split("."))
    siblings = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == above]
    same_name = [key for key in known if key.rpartition(".")[2] == name]
    nested = [key for key in same_name if key.startswith(path.partition(".")[0] + ".")]
    close = [f"{section}.{sibling}".lstrip(".") for sibling in difflib.get_close_matches(name, siblings, 2)]
    if meant := nested or close or same_name:
        return f"did you mean {' or '.join(meant[:2])}?"
    return f"{section or 'the top level'} has {', '.join(siblings)}"


def nearest_word(key: Key, value: object) -> str:
    """Return advice about a wrong value of a key that takes some words: the one or two probably meant."""
    words = {word.removeprefix("list of ").strip("()") for word in key.values.split(" | ")} - set(WORDS.values())
    wrong = [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)]
    close = [meant for word in wrong if word not in words for meant in difflib.get_close_matches(word, words, 2)]
    return f": did you mean {' or '.join(close)}?" if close else ""


def describe(schema: dict[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words: `int >= 1`, `k1 | abs`, `float > 0 | null`."""
    if "anyOf" in schema:
        return " | ".join(map(describe, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " | ".join(schema.get("enum") or [schema["const"]])
    if "$ref" in schema:
        return "section"
    if "prefixItems" in schema:
        items = schema["prefixItems"]
        return f"list of {len(items)}: each {describe(items[0])}"
    if "items" in schema:
        item = describe(schema["items"])
        count = "non-empty " if "minItems" in schema else ""
        return f"{count}list of {f'({item})' if ' | ' in item else item}"
    if "additionalProperties" in schema:
        values = schema["additionalProperties"]
        return "keys with " + ("any value" if values is True else describe(values))
    return WORDS[schema["type"]] + _limits(schema)


def _limits(schema: dict[str, Any]) -> str:
    """Return ` >= 1`, ` in (0, 1]`."""
    found = [(*words, schema[name]) for name, *words in LIMITS if schema.get(name, UNREACHED) < UNREACHED]
    if len(found) == 2:
        (_, opening, low), (_, closing, high) = found
        return f" in {opening}{low:g}, {high:g}{closing}"
    return "".join(f" {sign} {limit:g}" for sign, _, limit in found)


def config_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command that takes CONFIG [key=value ...]."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=description, epilog=config_help(), formatter_class=layout)
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="overrides of single keys")
    return parser


def config_help(width: int = 140) -> str:
    """Return every key of the YAML, by section, in aligned columns.

    Args:
        width: columns of text.
    """
    intro = (
        "CONFIG is a YAML file of these keys; key=value on the command line overrides one, such as "
        "actor.optim.lr=1e-6. `base: OTHER.yaml` (a path or a list, relative to the file) in CONFIG takes over the "
        "keys that OTHER.yaml sets. All other paths are relative to the current directory."
    )
    sections = [key for key in keys() if "." not in key.path]
    return "\n\n".join([textwrap.fill(intro, width), *(_section_help(section, width) for section in sections)])


def _section_help(section: Key, width: int) -> str:
    rows = []
    for key in keys():
        if key.path.startswith(f"{section.path}.") and (not key.section or key.default is None):
            default = "required" if key.default is REQUIRED else show(key.default)
            values, meaning = key.values, key.meaning
            if len(values) > WIDEST_VALUES:  # before the meaning, as it would stretch the column
                values, meaning = "one of", f"[{values}] {meaning}"
            rows.append((key.path, values, default, meaning))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{section.path}: {section.meaning}"]
    for row in rows:
        start = f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:{widths[2]}}  "
        indent = " " * len(start)
        lines.append(textwrap.fill(start + row[3], width, subsequent_indent=indent, break_on_hyphens=False))
    return "\n".join(lines)
