"""Episodes as trajectories: the rows that are segments of one episode, on one rank and in order, joined."""

from dataclasses import replace

import torch
from torch import Tensor

from megappo.batch.fields import field_of
from megappo.batch.rows import NO_TOKENS, Rows, is_within, padded


class Trajectories:
    """One row per episode, as estimators take it for one response.

    Its response is what the policy wrote in all segments, one after the other, without the environment's tokens.
    Episodes without any token of mask 1 are left out. Where neither changes the rows, `joined` are the rows themselves.

    Attributes:
        joined: E rows without tokens and what these have, with the per-row fields of their last segments.
    """

    def __init__(self, rows: Rows):
        self.rows = self.joined = rows
        self._is_token = rows.response_mask.bool()
        lengths = self._is_token.sum(dim=1)
        if "segments" not in rows.fields and bool(lengths.all()):
            return
        is_first = rows.fields["segments"] == 0 if "segments" in rows.fields else torch.ones_like(lengths).bool()
        episodes = is_first.long().cumsum(0) - 1
        num_episodes = int(is_first.sum())
        totals = lengths.new_zeros(num_episodes).index_add(0, episodes, lengths)
        is_kept = totals > 0
        self._is_kept = is_kept[episodes]
        self._trajectories = (is_kept.long().cumsum(0) - 1)[episodes]
        self._lengths = totals[is_kept]
        self._width = int(totals.max()) if num_episodes else 0
        last = (episodes.bincount(minlength=num_episodes).cumsum(0) - 1)[is_kept]
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
        """Join [B, R] to [E, W]. The tokens of an episode follow each other in its rows."""
        return padded(values[self._is_token], self._lengths, self._width)

    def _cut(self, values: Tensor) -> Tensor:
        """Cut [E, W] to [B, R]."""
        flat = values[is_within(self._lengths, self._width)]
        return values.new_zeros(self._is_token.shape).masked_scatter_(self._is_token, flat)
