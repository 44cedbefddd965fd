"""What the schema says about each key, as text: for `--help` and for error messages."""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megappo.config.kinds import OneOf
from megappo.config.schema import Config
from megappo.config.section import Section

REQUIRED = PydanticUndefined
"""`Key.default` of a key that must be set."""
NAME = "NAME"
"""Stands in a key for a name that the user gives, as in eval.datasets.NAME.n."""

UNREACHED = 10**6
"""Limits of at least this much exclude what no machine has memory for; only errors show them."""
WORDS: dict[object, str] = {bool: "true | false", str: "text", int: "int", float: "float", Any: "any value"}


@dataclass(frozen=True)
class Key:
    """One key of the schema.

    Attributes:
        path: dotted, as an override writes it.
        values: what its value may be, in words.
        default: REQUIRED where there is none.
        section: the type of the keys below it; None for a plain value.
    """

    path: str
    values: str
    default: object
    description: str
    section: type[Section] | None


@cache
def keys() -> tuple[Key, ...]:
    """Every key, a section before the keys in it, in the schema's order."""
    return tuple(_keys(Config, "", REQUIRED))


def _keys(model: type[Section], prefix: str, defaults: object) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        default = getattr(defaults, name) if isinstance(defaults, Section) else field.get_default()
        section = _section(field.annotation)
        yield Key(prefix + name, describe(field), default, field.description or "", section)
        if section:
            yield from _keys(section, f"{prefix}{name}.", default)
        if named := _named_section(field.annotation):
            path = f"{prefix}{name}.{NAME}"
            yield Key(path, "section", REQUIRED, named.__doc__ or "", named)
            yield from _keys(named, f"{path}.", REQUIRED)


def declared(path: Sequence[str]) -> str:
    """A key as the schema has it: with NAME for a name that the user has given."""
    known, found = {key.path for key in keys()}, ""
    for name in path:
        found += f".{NAME}" if f"{found}.{NAME}" in known else f".{name}" if found else name
    return found


def nearest_key(path: str) -> str:
    """Advice on an unknown key: the key probably meant, else what its section holds."""
    as_declared = declared(path.split("."))
    if as_declared != path:
        shown = as_declared.rpartition(".")[0], path.rpartition(".")[0]
        return nearest_key(as_declared).replace(*shown)
    known = [key.path for key in keys()]
    section, _, name = path.rpartition(".")
    if path in known:  # written with its dots, as a key of a YAML file
        return f"dots are for the command line; here nest it: {section}: {{{name}: ...}}"
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    if meant := _meant(path, siblings, known):
        return f"did you mean {' or '.join(meant)}?"
    return f"{section or 'the top level'} has {', '.join(siblings)}"


def nearest_word(key: Key, value: object) -> str:
    """Advice on a wrong value of a key that takes some words: the one or two probably meant."""
    words = {word.removeprefix("list of ").strip("()") for word in key.values.split(" | ")} - set(WORDS.values())
    wrong = [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)]
    close = [meant for word in wrong if word not in words for meant in difflib.get_close_matches(word, words, 2)]
    return f": did you mean {' or '.join(close)}?" if close else ""


def show(value: object) -> str:
    """A value as a message or an override writes it."""
    if isinstance(value, Section):
        value = value.model_dump(mode="json")
    text = json.dumps(value, ensure_ascii=False, default=str)
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


def counted(count: int, what: str) -> str:
    """`1 rank`, `2 ranks`, `3 processes`."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{count} {what if count == 1 else plural}"


def describe(field: FieldInfo) -> str:
    """What a field's value may be: `int >= 1`, `k1 | abs`, `list of text`, `float > 0 | null`."""
    return _describe(field.annotation, field.metadata)


def _describe(annotation: object, metadata: Iterable[object] = ()) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    for item in metadata:
        if isinstance(item, OneOf):
            return " | ".join(item.names)
    if origin is Annotated:
        inner = [limit for item in args[1:] for limit in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _describe(args[0], [*inner, *metadata])
    if origin in (Union, UnionType):
        return " | ".join("null" if option is NoneType else _describe(option, metadata) for option in args)
    if origin is Literal:
        return " | ".join(str(option) for option in args)
    if origin is tuple:
        return _describe_list(args, metadata)
    if origin is dict:
        return "keys with " + _describe(args[1])
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return WORDS[annotation] + _bounds(metadata)


def _describe_list(args: tuple, metadata: Iterable[object]) -> str:
    if args[-1] is not ...:
        return f"list of {len(args)}: each {_describe(args[0])}"
    empty_is_wrong = any(isinstance(item, MinLen) for item in metadata)
    item = _describe(args[0])
    return f"{'non-empty ' if empty_is_wrong else ''}list of {f'({item})' if ' | ' in item else item}"


def _bounds(metadata: Iterable[object]) -> str:
    """` >= 1`, ` in (0, 1]`: the outermost, that is last, limit of each side, below UNREACHED."""
    low = high = None
    for item in metadata:
        match item:
            case Ge(ge=limit):
                low = (">=", f"[{limit}")
            case Gt(gt=limit):
                low = (">", f"({limit}")
            case Le(le=int() | float() as limit) if limit < UNREACHED:
                high = ("<=", f"{limit}]")
            case Lt(lt=limit):
                high = ("<", f"{limit})")
    if low and high:
        return f" in {low[1]}, {high[1]}"
    if low:
        return f" {low[0]} {low[1][1:]}"
    return f" {high[0]} {high[1][:-1]}" if high else ""


def _section(annotation: object) -> type[Section] | None:
    for option in (annotation, *(get_args(annotation) if get_origin(annotation) is not dict else ())):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def _named_section(annotation: object) -> type[Section] | None:
    """Of a table of sections by names that the user gives."""
    return _section(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def _meant(path: str, siblings: Mapping[str, str], known: list[str]) -> list[str]:
    """Keys that one may mean by an unknown one: of its section those with all of its words, or that nearly of its name;
    that of its name elsewhere; of its section those with its last word; that nearly of its name elsewhere.

    Args:
        siblings: the section's keys by their names.
    """
    name = path.rpartition(".")[2]
    words = name.split("_")
    return (
        [key for sibling, key in siblings.items() if set(words) <= set(sibling.split("_"))]
        or [siblings[close] for close in difflib.get_close_matches(name, siblings, 1, 0.8)]
        or _elsewhere(path, known, 1.0)
        or [key for sibling, key in siblings.items() if sibling.split("_")[-1] == words[-1]]
        or _elsewhere(path, known, 0.8)
    )


def _elsewhere(path: str, known: list[str], cutoff: float) -> list[str]:
    """The key of a name that is like it by `cutoff` in another section: of several such sections one below the same
    top level."""
    by_name: dict[str, list[str]] = {}
    for key in known:
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    names = difflib.get_close_matches(path.rpartition(".")[2], by_name, 1, cutoff)
    found = [key for name in names for key in by_name[name]]
    return sorted(found, key=lambda key: not key.startswith(path.partition(".")[0] + "."))[:1]
