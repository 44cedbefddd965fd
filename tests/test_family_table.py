"""The table of families in docs/models.md is what the tables of the tests cover."""

import importlib.util
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from types import ModuleType

from published_configs import BY_FAMILY
from tiny_shapes import architecture_of

from megappo.architecture.families import FAMILIES

ROOT = Path(__file__).parents[1]
COLUMNS = ("logits", "update", "layouts", "round trip", "run on a CPU", "critic", "adapters")


def tables(file: str) -> ModuleType:
    """Return a test's module, for its tables."""
    path = ROOT / "tests" / f"{file}.py"
    spec = importlib.util.spec_from_file_location(f"tables_of_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def named(model_types: Iterable[str]) -> set[str]:
    return {architecture_of(model_type) for model_type in model_types}


def covered() -> dict[str, set[str]]:
    """Return the architectures that the tests cover, by column."""
    build, train, trip = (
        tables("models/test_build"),
        tables("models/test_train_engine"),
        tables("weights/test_round_trip"),
    )
    towers = {name for name, family in FAMILIES.items() if family.vision}
    assert len(towers) == len(tables("models/test_vision").VISION), "outputs, updates, layouts and critics are there"
    found = {
        "logits": named(model_type for model_type, _ in (build.MODELS | build.MIXTURES).values()) | towers,
        "update": {*BY_FAMILY},
        "layouts": named(("qwen2", *train.VARIANTS, *train.MIXTURES)) | towers,
        "round trip": named((*chain(*trip.FAMILIES.values()), *trip.OTHER_FAMILIES, *trip.MIXTURES, trip.STACKED))
        | towers,
        "run on a CPU": named(tables("run/test_families").MODELS),
        "critic": {*BY_FAMILY},
        "adapters": {*tables("models/test_adapters").ADAPTED},
    }
    assert tuple(found) == COLUMNS
    return found


def test_the_table_of_families_is_what_the_tests_cover() -> None:
    section = (ROOT / "docs" / "models.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = rows
    assert header == ["architecture", "models", *COLUMNS]
    assert [row[0].strip("`") for row in rows] == [*FAMILIES]
    notes = dict(re.findall(r"^- \*\*([a-z])\*\*: (.+)", section, re.M))
    found = covered()
    for family, _, *cells in rows:
        for column, cell in zip(COLUMNS, cells, strict=True):
            is_covered, note = cell.startswith("yes"), cell.removeprefix("yes").strip()
            assert is_covered == (family.strip("`") in found[column]), (family, column)
            assert note in notes or (is_covered and not note), (family, column, "a note gives the reason")
