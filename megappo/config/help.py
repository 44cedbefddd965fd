"""The text of `--help`: every key with its type, default and meaning, from the schema itself."""

import argparse
import textwrap

from megappo.config.describe import REQUIRED, Key, keys, show

WIDEST_VALUES = 46
"""Characters."""


def config_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Of a command that takes CONFIG [key=value ...]."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=description, epilog=config_help(), formatter_class=layout)
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="overrides of single keys")
    return parser


def config_help(width: int = 140) -> str:
    """Every key of the YAML, grouped by section, in aligned columns.

    Args:
        width: columns of text.
    """
    sections: dict[str, list[Key]] = {}
    for key in keys():
        sections.setdefault(key.path.partition(".")[0], []).append(key)
    intro = (
        "CONFIG is a YAML file of these keys; key=value on the command line overrides one, such as "
        "actor.optim.lr=1e-6. `base: OTHER.yaml` (a path or a list, relative to the file) in CONFIG takes over what "
        "OTHER.yaml sets. All other paths are relative to the current directory."
    )
    return "\n\n".join([textwrap.fill(intro, width), *(_section(found, width) for found in sections.values())])


def _section(section: list[Key], width: int) -> str:
    head, *rest = section
    rows = [key for key in rest if not key.section or key.default is None]
    columns = [(key.path, values, _default(key), meaning) for key in rows for values, meaning in [_values(key)]]
    widths = [max(len(row[i]) for row in columns) for i in range(3)]
    return "\n".join([f"{head.path}: {head.description}", *(_row(row, widths, width) for row in columns)])


def _row(row: tuple[str, ...], widths: list[int], width: int) -> str:
    left = "  " + "  ".join(cell.ljust(column) for cell, column in zip(row, widths, strict=False)) + "  "
    meaning = textwrap.wrap(row[3], max(width - len(left), 30))
    return f"\n{' ' * len(left)}".join([left + meaning[0], *meaning[1:]])


def _values(key: Key) -> tuple[str, str]:
    """What the key may be, and its meaning; a long list of words goes before the meaning, not to stretch its column."""
    if len(key.values) <= WIDEST_VALUES:
        return key.values, key.description
    return "one of", f"[{key.values}] {key.description}"


def _default(key: Key) -> str:
    return "required" if key.default is REQUIRED else show(key.default)
