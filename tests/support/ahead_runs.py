"""Read what runs that sample ahead of training have kept."""

import json
from pathlib import Path
from typing import Any

from megappo.batch.rows_file import RowsFile
from megappo.observe.files import rows_file

Response = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens of a prompt, and of a response to it."""


def journal_lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's journal, without lines that hold settings, or that a kill cut short."""
    texts = [path.read_text("utf-8") for path in (run / "ahead").glob("engine_*")]
    return [json.loads(line) for text in texts for line in text.split("\n")[1:-1]]


def trained_responses(record: Path, step: int) -> list[Response]:
    """Return the responses that a step trained on, from the record of its rollouts."""
    with RowsFile(rows_file(record, step)) as file:
        rows = file.rows(0, len(file.table.prompt_ids))
    responses = []
    for sequence, length in zip(rows.sequences, rows.prompt_lengths.tolist(), strict=True):
        tokens = tuple(sequence.tolist())
        responses.append((tokens[:length], tokens[length:]))
    return responses
