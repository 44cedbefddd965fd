"""A step's rows in a file: safetensors, unpadded, so that any number of ranks reads its share of what any number wrote.

prompt_ids, prompt_lengths, response_lengths: [B] int64, rows in the order of their numbers
tokens: [sum of prompt + response lengths] int64, row after row
fields.NAME: [sum of response lengths], [B] or [B, K] float32
facts (in the header): JSON, what the writer says of all rows
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megappo.batch.exchange import RowTable
from megappo.batch.fields import FIELDS, Field, field_of
from megappo.batch.rows import Rows
from megappo.errors import ActionableError

FACTS = "facts"
FIELD = "fields."
COLUMNS = ("prompt_ids", "prompt_lengths", "response_lengths")


class RowsFileError(ActionableError, ValueError):
    """A file that does not hold rows, or not whole; the message names it."""


def write_rows(path: Path, rows: Rows, facts: Mapping[str, Any]) -> None:
    """Write all rows of a step, numbered 0, 1, 2, ..., with their tokens and fields.

    Args:
        facts: JSON of what is true of all of them.
    Raises:
        OSError: the file cannot be written.
    """
    tensors = {name: getattr(rows, name).clone() for name in COLUMNS} | {"tokens": rows.input_ids.clone()}
    for name, values in rows.fields.items():
        ragged = field_of(name).per_token
        tensors[FIELD + name] = values[_written(rows)] if ragged else values.clone()
    write_tensors(path, tensors, {FACTS: json.dumps(facts)})


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file.

    Raises:
        OSError: it cannot be written.
    """
    try:
        save_file(dict(tensors), path, dict(metadata or {}))
    except SafetensorError as error:  # it says the system's error in words of its own
        raise OSError(f"cannot write {path}: {error}") from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors 0.8 lets its owner alone read it


def _written(rows: Rows) -> torch.Tensor:
    """[B, R] bool: the tokens of the responses, without padding."""
    return torch.arange(rows.max_response_length) < rows.response_lengths[:, None]


class RowsFile(AbstractContextManager):
    """What `write_rows` wrote. A context manager: the file stays open (memory-mapped) inside it.

    Attributes:
        facts: as they were given to `write_rows`.
        table: of all rows.

    Raises:
        FileNotFoundError: it is not there.
        RowsFileError: it is damaged, or something else.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
            self.facts = json.loads((self._file.metadata() or {})[FACTS])
            columns = [self._file.get_tensor(name) for name in COLUMNS]
        except (SafetensorError, KeyError, ValueError) as error:
            raise RowsFileError(f"{path} holds no whole rows of a run ({error}): copy it again") from error
        self._prompt_ids, self._prompt_lengths, self._response_lengths = columns
        self.names = [name.removeprefix(FIELD) for name in sorted(self._file.keys()) if name.startswith(FIELD)]
        if unknown := [name for name in self.names if name not in FIELDS]:
            raise RowsFileError(f"{path} has a field {unknown[0]!r} that no part of this program declares")
        self._response_bounds = [0, *self._response_lengths.cumsum(0).tolist()]
        self._bounds = [0, *(self._prompt_lengths + self._response_lengths).cumsum(0).tolist()]
        self.table = RowTable(self._prompt_ids, self._prompt_lengths, self._response_lengths, self._policy_lengths())

    def __exit__(self, *error: object) -> None:
        del self._file

    def rows(self, start: int, stop: int) -> Rows:
        """Rows start:stop, with the padded width of all."""
        part = slice(start, stop)
        tokens = self._file.get_slice("tokens")[self._bounds[start] : self._bounds[stop]]
        return Rows(
            torch.arange(start, stop),
            self._prompt_ids[part],
            self._prompt_lengths[part],
            self._response_lengths[part],
            tokens,
            {name: self._field(name, field_of(name), start, stop) for name in self.names},
        )

    def field(self, name: str) -> torch.Tensor:
        """A field of all rows that has a number of each, [B]."""
        return self._file.get_tensor(FIELD + name)

    def _field(self, name: str, kind: Field, start: int, stop: int) -> torch.Tensor:
        values = self._file.get_slice(FIELD + name)
        if not kind.per_token:
            return values[start:stop]
        padded = torch.zeros(stop - start, self.table.max_response_length)
        written = torch.arange(padded.shape[1]) < self._response_lengths[start:stop, None]
        padded[written] = values[self._response_bounds[start] : self._response_bounds[stop]]
        return padded

    def _policy_lengths(self) -> torch.Tensor:
        mask = self._file.get_tensor(FIELD + "response_mask")
        return torch.stack([part.sum() for part in mask.split(self._response_lengths.tolist())]).long()
