"""Write the tables of docs/coming_from.md from megappo/config/elsewhere.yaml.

usage: .venv/bin/python tools/coming_from.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.config.config_error import show
from megappo.config.elsewhere import BELOW, OLD_PREFIX, System, TheirKey, systems

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"
MARK = "<!-- Below this line: tools/coming_from.py -->\n"


def cell(keys: list[str]) -> str:
    """Return keys as code, several of one section as the section and their names."""
    sections: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.removesuffix(BELOW).rpartition(".")
        sections.setdefault(section, []).append(name + BELOW * key.endswith(BELOW))
    parts = []
    for section, names in sections.items():
        if section and len(names) > 1:
            parts.append(f"`{section}`: " + ", ".join(f"`{name}`" for name in names))
        else:
            parts += [f"`{section}.{name}`".replace("`.", "`") for name in names]
    return "; ".join(parts)


def has_line(row: TheirKey) -> bool:
    """Return whether a key is translated."""
    return not row.note and not row.missing


def is_same(key: str, row: TheirKey) -> bool:
    """Return whether a key has our name."""
    return row.is_renamed and not row.values and key.removeprefix(OLD_PREFIX) == row.key


def group_of(key: str, row: TheirKey) -> tuple[str, str, str]:
    """Return what rows on one line have in common: the remark, or, without one, their section and ours. The keys of
    both cells are in the same order."""
    translated = {theirs: ours for theirs, ours in row.values.items() if ours not in (None, theirs)}
    pairs = [f"{show(theirs)} -> {show(ours)}".replace('"', "") for theirs, ours in translated.items()]
    if remark := row.computed or ", ".join(pairs):
        return remark, "", ""
    return "", key.rpartition(".")[0], row.key.partition(".")[0]


def lines(system: System) -> Iterator[str]:
    """Yield the lines of a system's table."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key, row in system.rows.items():
        if has_line(row) and not is_same(key, row):
            groups.setdefault(group_of(key, row), []).append(key)
    yield from ("", f"## {system.title}", f"| {system.title} | here | remark |", "| --- | --- | --- |")
    for (remark, _, _), keys in groups.items():
        ours = cell(list(dict.fromkeys(system.rows[key].key for key in keys)))
        yield f"| {cell(keys)} | {ours} | {remark} |"
    for method, values in system.defaults.items():
        settings = ", ".join(f"`{key}={'null' if value is None else value}`" for key, value in values.items())
        name = f" with {method}" if method else ""
        yield f"| not set{name} | {settings} | {system.title}'s default, which differs |".replace("=False", "=false")
    num_others = sum(not has_line(row) for row in system.rows.values())
    yield from (
        "",
        f"{num_others} further keys have no counterpart or need none: `megappo import` gives the reason.",
    )


def page(text: str) -> str:
    """Return the page with the tables of today below its mark."""
    tables = [line for name, system in systems().items() if "_" not in name for line in lines(system)]
    return text.partition(MARK)[0] + MARK + "\n".join(tables) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
