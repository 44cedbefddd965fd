"""Rows of a step's batch: one row is one response with its prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megappo.batch.fields import field_of

NO_TOKENS = torch.empty(0, dtype=torch.int64)
"""The input_ids of rows whose tokens are on other ranks."""


@dataclass(frozen=True, eq=False)
class Rows:
    """B rows held by one rank.

    Attributes:
        ids: [B] int64, row numbers: 0.. over all ranks once `Exchange.number` has numbered them; before, any numbers
            that differ within a prompt.
        prompt_ids: [B] int64, the same for all rows that answer the same prompt; any number of rows may share one.
        prompt_lengths, response_lengths: [B] int64, in tokens.
        input_ids: [T] int64, prompt and response of row after row, unpadded; empty = the tokens are on other ranks.
        fields: the fields of `FIELDS` that have been written: name -> float32, [B] (per row), [B, K] (several columns
            per row) or [B, R] (per response token, right-padded with 0); or uint8, [T, K]. R is the longest response of
            the whole step, so it is the same on all ranks.

    Raises:
        ValueError: a length or shape does not fit the rest, or there is no such field; the message names it.
    """

    ids: Tensor
    prompt_ids: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    input_ids: Tensor
    fields: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = len(self.ids)
        found = len(self.input_ids)
        expected = int(self.lengths.sum())
        if found and found != expected:
            raise ValueError(f"{found} input_ids; expected {expected}, the sum of prompt and response lengths")
        longest = int(self.response_lengths.max()) if size else 0
        width = max(longest, self.max_response_length)
        for name, values in self.fields.items():
            field = field_of(name)
            shape = [size, width] if field.per_token else [size]
            if field.has_columns:
                shape = [size, *(values.shape[1:2] or [1])]
            elif field.has_bytes:
                shape = [found, *(values.shape[1:2] or [1])]
            if list(values.shape) != shape:
                raise ValueError(
                    f"field {name} has shape {list(values.shape)}; expected {shape}, for it is {field.meaning}"
                )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row's prompt and response, [B] int64."""
        return self.prompt_lengths + self.response_lengths

    @property
    def old_log_probs(self) -> Tensor:
        """Log-probs with which the policy loss compares, [B, R]: the trainer's, or the engine's without these."""
        return self.fields["old_log_probs" if "old_log_probs" in self.fields else "rollout_log_probs"]

    @property
    def sequences(self) -> tuple[Tensor, ...]:
        """The tokens of each row, [prompt + response]."""
        return self.input_ids.split(self.lengths.tolist())

    @property
    def max_response_length(self) -> int:
        """Width R of the per-token fields; without any, this rank's longest response."""
        widths = [values.shape[-1] for name, values in self.fields.items() if field_of(name).per_token]
        return widths[0] if widths else int(self.response_lengths.max()) if len(self) else 0

    @property
    def response_mask(self) -> Tensor:
        """The field of this name, [B, R] float32; without it 1 on every response token."""
        if "response_mask" in self.fields:
            return self.fields["response_mask"]
        return is_within(self.response_lengths, self.max_response_length).float()

    def field(self, name: str) -> Tensor:
        """Return a field's values.

        Raises:
            ValueError: they have not been written, or there is no such field.
        """
        if name not in self.fields:
            raise ValueError(f"rows have no {name} yet: written by {field_of(name).writer}")
        return self.fields[name]

    def select(self, indices: Sequence[int] | Tensor) -> "Rows":
        """Return the rows at these positions (not row numbers), in this order; R stays."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        fields = {}
        for name, values in self.fields.items():
            fields[name] = taken(values, self.lengths, index) if field_of(name).has_bytes else values[index]
        return Rows(
            self.ids[index],
            self.prompt_ids[index],
            self.prompt_lengths[index],
            self.response_lengths[index],
            taken(self.input_ids, self.lengths, index) if len(self.input_ids) else self.input_ids,
            fields,
        )


def is_within(lengths: Tensor, width: int) -> Tensor:
    """Return a mask, [b, width] bool, of the numbers of rows of these lengths that are padded to `width`."""
    return torch.arange(width) < lengths[:, None]


def padded(flat: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Return spans that are laid end to end as rows, [b, width], padded with 0."""
    mask = is_within(lengths, width)
    return flat.new_zeros(mask.shape).masked_scatter_(mask, flat)


def positions_in(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the positions, [T] int64, in spans that begin at `starts`, one span after the other; [b] int64 both."""
    here = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) + (starts - here).repeat_interleave(lengths)


def taken(flat: Tensor, lengths: Tensor, index: Tensor) -> Tensor:
    """Take the spans at `index`, in this order, from spans laid end to end."""
    starts = lengths.cumsum(0) - lengths
    return flat[positions_in(starts[index], lengths[index])]
