"""Responses for the report's browser: responses of evaluations, and kept rollouts with the numbers of their tokens."""

import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megappo.observe.files import number_of
from megappo.observe.kept_table import read_kept
from megappo.observe.samples import mark_passed, read_samples, sample_files

ROWS_PER_STEP = 24
LONGEST_TEXT = 8_000
"""Characters of a text that are shown."""
LONGEST_RESPONSE = 1_000
"""Tokens of a response whose numbers are shown."""
MOST_CHARACTERS = 2_500_000
"""Characters of JSON that the responses of a page may take."""
NUMBERS = (
    "old_log_probs",
    "rollout_log_probs",
    "staleness",
    "ref_log_probs",
    "teacher_log_probs",
    "values",
    "advantages",
    "returns",
)


def report_samples(folder: Path, most_characters: int) -> list[dict[str, Any]]:
    """Return responses of as many steps as fit into a page: of the last step, the first, then the others from the last
    one back."""
    files = sorted([*sample_files(folder), *sample_files(folder, "parquet")], key=number_of)
    shown: list[dict[str, Any]] = []
    remaining = most_characters
    for path in dict.fromkeys([*files[-1:], *files[:1], *reversed(files)]):
        if remaining < 0:
            break
        for sample in _kept(path) if path.suffix == ".parquet" else _held_out(path):
            if sample.get("images"):
                sample["images"] = [_image_url(folder / name) for name in sample["images"] if (folder / name).is_file()]
            text = json.dumps(sample)
            remaining -= len(text)
            if remaining < 0:
                break
            shown.append(json.loads(text, parse_constant=str))  # NaN, which JSON lacks, becomes text
    mark_passed(shown, folder)
    return sorted(shown, key=lambda sample: sample["step"])


def _image_url(path: Path) -> str:
    return "data:image/jpeg;base64," + b64encode(path.read_bytes()).decode()


def _held_out(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the responses of an evaluation."""
    for sample in read_samples(path):
        yield {name: _shortened(value) for name, value in sample.items()}


def _kept(path: Path) -> Iterator[dict[str, Any]]:
    """Yield kept rollouts of a step: the ones with the lowest scores, and the first ones."""
    table = read_kept(path)
    scores = table["score"].to_pylist()
    lowest = sorted(range(len(scores)), key=lambda row: scores[row])[: ROWS_PER_STEP // 3]
    first = [row for row in range(len(scores)) if row not in lowest][: ROWS_PER_STEP - len(lowest)]
    for row in table.take(sorted([*lowest, *first])).to_pylist(maps_as_pydicts="strict"):
        row = {name: _shortened(value) for name, value in row.items() if value is not None and name != "tokens"}
        for name in NUMBERS:
            if name in row:
                row[name] = [None if number is None else float(f"{number:.4g}") for number in row[name]]
        yield row


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return f"{value[:LONGEST_TEXT]} ... ({len(value) - LONGEST_TEXT:,} more characters)"
    if isinstance(value, dict) and value.get("begins"):  # a prompt that mostly repeats turns
        return value | {"text": _shortened(value["text"])}
    return [_shortened(one) for one in value[:LONGEST_RESPONSE]] if isinstance(value, list) else value
