"""A step's rows in a file: safetensors, unpadded, so that any number of ranks can read what any number wrote.

prompt_ids, prompt_lengths, response_lengths: [B] int64, rows in the order of their numbers
tokens: [sum of prompt + response lengths] int64, row after row
fields.NAME: [sum of response lengths], [B] or [B, K] float32
facts (in the header): JSON, the writer's facts about all rows
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megappo.batch.exchange import RowTable
from megappo.batch.fields import FIELDS, field_of
from megappo.batch.rows import Rows, is_response
from megappo.errors import ActionableError

FACTS = "facts"
FIELD = "fields."
COLUMNS = ("prompt_ids", "prompt_lengths", "response_lengths")


class RowsFileError(ActionableError, ValueError):
    """A file that holds no rows or is damaged; the message names it."""


def write_rows(path: Path, rows: Rows, facts: Mapping[str, Any]) -> None:
    """Write all rows of a step, numbered 0, 1, 2, ..., with their tokens and fields.

    Args:
        facts: JSON, true of all rows.
    Raises:
        OSError: the file cannot be written.
    """
    tensors = {name: getattr(rows, name).clone() for name in COLUMNS} | {"tokens": rows.input_ids.clone()}
    mask = is_response(rows.response_lengths, rows.max_response_length)
    for name, values in rows.fields.items():
        tensors[FIELD + name] = values[mask] if field_of(name).per_token else values.clone()
    write_tensors(path, tensors, {FACTS: json.dumps(facts)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file.

    Raises:
        OSError: it cannot be written.
    """
    try:
        save_file(dict(tensors), path, dict(metadata or {}))
    except SafetensorError as error:  # it wraps the system's error
        raise OSError(f"cannot write {path}: {error}") from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors 0.8 lets its owner alone read it


class RowsFile(AbstractContextManager):
    """A file of `write_rows`, open (memory-mapped) until the context ends.

    Attributes:
        facts: as given to `write_rows`.
        table: of all rows.

    Raises:
        FileNotFoundError: it does not exist.
        RowsFileError: it is damaged, or another kind of file.
    """

    def __init__(self, path: Path):
        try:
            self._file = safe_open(path, framework="pt")
            self.facts = json.loads((self._file.metadata() or {})[FACTS])
            prompt_ids, prompt_lengths, response_lengths = (self._file.get_tensor(name) for name in COLUMNS)
        except (SafetensorError, KeyError, ValueError) as error:
            raise RowsFileError(f"{path} holds no whole rows of a run ({error}): copy it again") from error
        self.names = [name.removeprefix(FIELD) for name in sorted(self._file.keys()) if name.startswith(FIELD)]
        if unknown := [name for name in self.names if name not in FIELDS]:
            raise RowsFileError(f"{path} has a field {unknown[0]!r} that no part of this program declares")
        self._token_bounds = [0, *(prompt_lengths + response_lengths).cumsum(0).tolist()]
        self._response_bounds = [0, *response_lengths.cumsum(0).tolist()]
        mask = self._file.get_tensor(FIELD + "response_mask")
        policy_lengths = torch.stack([part.sum() for part in mask.split(response_lengths.tolist())]).long()
        self.table = RowTable(prompt_ids, prompt_lengths, response_lengths, policy_lengths)

    def __exit__(self, *error: object) -> None:
        del self._file

    def rows(self, start: int, stop: int) -> Rows:
        """Read rows start:stop, with the padded width of all."""
        ids = torch.arange(start, stop)
        table = self.table
        tokens = self._file.get_slice("tokens")[self._token_bounds[start] : self._token_bounds[stop]]
        fields = {name: self._field(name, start, stop) for name in self.names}
        lengths = table.prompt_lengths[ids], table.response_lengths[ids]
        return Rows(ids, table.prompt_ids[ids], *lengths, tokens, fields)

    def field(self, name: str) -> Tensor:
        """Read a field with one number per row, of all rows: [B]."""
        return self._file.get_tensor(FIELD + name)

    def _field(self, name: str, start: int, stop: int) -> Tensor:
        values = self._file.get_slice(FIELD + name)
        if not field_of(name).per_token:
            return values[start:stop]
        mask = is_response(self.table.response_lengths[start:stop], self.table.max_response_length)
        flat = values[self._response_bounds[start] : self._response_bounds[stop]]
        return torch.zeros(mask.shape).masked_scatter_(mask, flat)
