"""A step's rows in a file: safetensors, unpadded, so that any number of ranks can read what any number wrote.

prompt_ids, prompt_lengths, response_lengths: [B] int64, rows in the order of their numbers
tokens: [sum of prompt + response lengths] int64, row after row
fields.NAME: [sum of response lengths], [B] or [B, K] float32; or [sum of prompt + response lengths, K] uint8
facts (in the header): JSON, the writer's facts about all rows
"""

import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megappo.batch.exchange import Batch, Exchange, RowTable
from megappo.batch.fields import FIELDS, field_of
from megappo.batch.rows import Rows, is_within, padded
from megappo.config.text_files import open_file
from megappo.errors import ActionableError

FACTS = "facts"
FIELD = "fields."
COLUMNS = ("prompt_ids", "prompt_lengths", "response_lengths")


def write_rows(path: Path, rows: Rows, facts: Mapping[str, Any]) -> None:
    """Write all rows of a step, numbered 0, 1, 2, ..., with their tokens and fields.

    Args:
        facts: JSON, true of all rows.
    Raises:
        OSError: the file cannot be written.
    """
    tensors = {name: getattr(rows, name).clone() for name in COLUMNS}
    tensors["tokens"] = rows.input_ids.clone()
    mask = is_within(rows.response_lengths, rows.max_response_length)
    for name, values in rows.fields.items():
        tensors[FIELD + name] = values[mask] if field_of(name).per_token else values.clone()
    write_tensors(path, tensors, {FACTS: json.dumps(facts)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file.

    Raises:
        OSError: it cannot be written.
    """
    try:
        save_file(dict(tensors), path, dict(metadata))
    except SafetensorError as error:  # it wraps the system's error
        raise OSError(f"cannot write {path}: {error}") from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors 0.8 lets its owner alone read it


class RowsFile(AbstractContextManager):
    """A file of `write_rows`, open (memory-mapped) until the context ends.

    Attributes:
        facts: as given to `write_rows`.
        table: table of all rows.

    Raises:
        FileNotFoundError: it does not exist.
        ActionableError: it is damaged, or another kind of file.
    """

    def __init__(self, path: Path):
        try:
            open_file(path, math.inf).close()  # safetensors would wait for the writer of a pipe
            self._file = safe_open(path, framework="pt")
            self.facts = json.loads((self._file.metadata() or {})[FACTS])
            prompt_ids, prompt_lengths, response_lengths = (self._file.get_tensor(name) for name in COLUMNS)
            mask = self._file.get_tensor(FIELD + "response_mask")
        except FileNotFoundError:
            raise
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ActionableError(f"{path} holds no whole rows of a run ({error}): copy it again") from error
        self.names = [name.removeprefix(FIELD) for name in sorted(self._file.keys()) if name.startswith(FIELD)]
        if unknown := [name for name in self.names if name not in FIELDS]:
            raise ActionableError(f"{path} has a field {unknown[0]!r} that no part of this program declares")
        policy_lengths = padded(mask, response_lengths, int(response_lengths.max())).sum(dim=1).long()
        self.table = RowTable(prompt_ids, prompt_lengths, response_lengths, policy_lengths)

    def __exit__(self, *error: object) -> None:
        del self._file

    def rows(self, start: int, stop: int) -> Rows:
        """Read rows start:stop, with the padded width of all."""
        table = self.table
        prompt_ids = table.prompt_ids[start:stop]
        prompt_lengths = table.prompt_lengths[start:stop]
        response_lengths = table.response_lengths[start:stop]
        tokens = self._spans("tokens", table.lengths, start, stop)
        fields = {}
        for name in self.names:
            if field_of(name).per_token:
                values = self._spans(FIELD + name, table.response_lengths, start, stop)
                fields[name] = padded(values, response_lengths, table.max_response_length)
            elif field_of(name).has_bytes:
                fields[name] = self._spans(FIELD + name, table.lengths, start, stop)
            else:
                fields[name] = self._file.get_slice(FIELD + name)[start:stop]
        return Rows(torch.arange(start, stop), prompt_ids, prompt_lengths, response_lengths, tokens, fields)

    def field(self, name: str) -> Tensor:
        """Read a field with one number per row, of all rows: [B]."""
        return self._file.get_tensor(FIELD + name)

    def batch(self, exchange: Exchange) -> Batch:
        """Read the rows that each rank owns; all ranks together."""
        owners = self.table.split(exchange.world_size)
        own = owners[exchange.rank]
        rows = self.rows(own[0], own[-1] + 1) if own else self.rows(0, 0)
        return Batch(rows, self.table, owners)

    def _spans(self, name: str, lengths: Tensor, start: int, stop: int) -> Tensor:
        """Read the numbers of rows start:stop of a tensor that holds `lengths` of each row, end to end."""
        return self._file.get_slice(name)[int(lengths[:start].sum()) : int(lengths[:stop].sum())]
