"""Write the tables of docs/coming_from.md from megappo/config/elsewhere.yaml.

usage: .venv/bin/python tools/coming_from.py
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.config.config_error import show
from megappo.config.elsewhere import BELOW, System, TheirKey, systems

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"
ONE_OF_OURS = re.compile(r"[a-z]+\.[a-z_]+")
"""A key or file that replaces what has no counterpart."""
MARK = "<!-- Below this line: tools/coming_from.py -->\n"


def cell(keys: list[str]) -> str:
    """Return keys as code, those of one section together: `a.{b,c}`."""
    sections: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.removesuffix(BELOW).rpartition(".")
        sections.setdefault(f"{section}." if section else "", []).append(name + BELOW * key.endswith(BELOW))
    parts = []
    for section, names in sections.items():
        several = "{" + ",".join(names) + "}" if len(names) > 1 and section else ""
        parts += [f"`{section}{several}`"] if several else [f"`{section}{name}`" for name in names]
    return ", ".join(parts)


def group_of(key: str, row: TheirKey) -> tuple[str, str, str]:
    """Return what rows on one line have in common: the remark, or, without one, their section and ours."""
    if row.missing and ONE_OF_OURS.search(row.missing):
        return row.missing, "", ""
    if row.missing or row.note:
        kind = "none" if row.missing else "not needed"
        return f"{kind}; `megappo import` gives the reason", "", ""
    translated = {theirs: ours for theirs, ours in row.values.items() if ours not in (None, theirs)}
    pairs = [f"{show(theirs)} -> {show(ours)}".replace('"', "") for theirs, ours in translated.items()]
    if row.computed or pairs:
        return row.computed or ", ".join(pairs), "", ""
    return "", key.rpartition(".")[0], row.key.partition(".")[0]


def lines(system: System) -> Iterator[str]:
    """Yield the lines of a system's table."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key, row in system.rows.items():
        groups.setdefault(group_of(key, row), []).append(key)
    yield from ("", f"## {system.title}", f"| {system.title} | here | remark |", "| --- | --- | --- |")
    for (remark, _, _), keys in groups.items():
        ours = list(dict.fromkeys(system.rows[key].key for key in keys if not system.rows[key].missing))
        yield f"| {cell(keys)} | {cell(list(filter(None, ours)))} | {remark} |"
    for method, values in system.defaults.items():
        settings = ", ".join(f"`{key}={'null' if value is None else value}`" for key, value in values.items())
        name = f" with {method}" if method else ""
        yield f"| not set{name} | {settings} | {system.title}'s default, which differs |".replace("=False", "=false")


def page(text: str) -> str:
    """Return the page with the tables of today below its mark."""
    tables = [line for system in systems().values() for line in lines(system)]
    return text.partition(MARK)[0] + MARK + "\n".join(tables) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
