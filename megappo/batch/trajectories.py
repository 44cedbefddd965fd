"""Episodes as trajectories: the rows that are segments of one episode, next to each other on one rank, joined."""

from dataclasses import replace

import torch
from torch import Tensor

from megappo.batch.fields import field_of
from megappo.batch.rows import NO_TOKENS, Rows, is_within, padded


class Trajectories:
    """One row per episode, as estimators take it for one response.

    Its response is what the policy wrote in all segments, turn after turn, without the environment's tokens. Segments
    may take turns, as an agent and its helpers do. Episodes without any token of mask 1 are left out. Where nothing
    changes the rows, `joined` are the rows themselves.

    Attributes:
        joined: E rows without tokens and what these have, with the per-row fields of the segments of their last turns.
    """

    def __init__(self, rows: Rows):
        self.rows = self.joined = rows
        self._is_token = rows.response_mask.bool()
        lengths = self._is_token.sum(dim=1)
        has_segments = "segments" in rows.fields
        if not has_segments and bool(lengths.all()):
            return
        own = rows.fields["episodes"].long() if has_segments else torch.arange(len(rows))
        found, episodes = ((rows.prompt_ids << 32) + own).unique_consecutive(return_inverse=True)
        totals = lengths.new_zeros(len(found)).index_add(0, episodes, lengths)
        is_kept = totals > 0
        self._is_kept = is_kept[episodes]
        self._trajectories = (is_kept.long().cumsum(0) - 1)[episodes]
        self._lengths = totals[is_kept]
        self._width = int(totals.max()) if len(found) else 0
        row_of_token = torch.arange(len(rows)).repeat_interleave(lengths)
        self._order: Tensor | slice = slice(None)
        if has_segments:
            turns = (episodes[row_of_token] << 32) + rows.fields["turns"][self._is_token].long()
            if bool((turns.diff() < 0).any()):
                self._order = turns.argsort(stable=True)
        last = row_of_token[self._order][self._lengths.cumsum(0) - 1]
        fields = {}
        for name, values in rows.fields.items():
            if not field_of(name).has_bytes:
                fields[name] = self._join(values) if field_of(name).per_token else values[last]
        self.joined = Rows(
            rows.ids[last], rows.prompt_ids[last], rows.prompt_lengths[last], self._lengths, NO_TOKENS, fields
        )

    def spread(self, **fields: Tensor) -> Rows:
        """Return the rows with fields of the trajectories added."""
        if self.joined is not self.rows:
            for name, values in fields.items():
                if field_of(name).per_token:
                    fields[name] = self._cut(values)
                else:  # repeated for each row, 0 for rows that are left out
                    fields[name] = values.new_zeros(len(self.rows))
                    fields[name][self._is_kept] = values[self._trajectories[self._is_kept]]
        return replace(self.rows, fields=self.rows.fields | fields)

    def _join(self, values: Tensor) -> Tensor:
        """Join [B, R] to [E, W]."""
        return padded(values[self._is_token][self._order], self._lengths, self._width)

    def _cut(self, values: Tensor) -> Tensor:
        """Cut [E, W] to [B, R]."""
        flat = values.new_empty(int(self._lengths.sum()))
        flat[self._order] = values[is_within(self._lengths, self._width)]
        return values.new_zeros(self._is_token.shape).masked_scatter_(self._is_token, flat)
