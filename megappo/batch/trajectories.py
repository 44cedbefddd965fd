"""Episodes as trajectories: the rows that are segments of one, which a rank has together and in order, joined."""

from dataclasses import replace

import torch

from megappo.batch.fields import field_of
from megappo.batch.rows import NO_TOKENS, Rows


class Trajectories:
    """A row for each episode, whose response is what the policy wrote in all of its segments, one after the other, as
    if the environment had said nothing: what an estimator takes for one response. Episodes without any token of mask 1,
    as they are masked, are left out. Where that leaves the rows as they are, the rows themselves.

    Attributes:
        joined: E rows without tokens; of fields per row those of the last segment.
    """

    def __init__(self, rows: Rows):
        self.rows = self.joined = rows
        self._is_token = rows.response_mask.bool()
        lengths = self._is_token.sum(dim=1)
        if "segments" not in rows.fields and bool(lengths.all()):
            return
        is_first = rows.fields["segments"] == 0 if "segments" in rows.fields else torch.ones_like(lengths).bool()
        episodes = is_first.long().cumsum(0) - 1
        starts = lengths.cumsum(0) - lengths
        offsets = starts - starts[is_first][episodes]
        is_last = torch.cat([is_first[1:], is_first.new_ones(1)]) if len(rows) else is_first
        totals = (offsets + lengths)[is_last]
        self._is_kept = (totals > 0)[episodes]
        self._of_row = ((totals > 0).long().cumsum(0) - 1)[episodes]
        is_last, totals = is_last & self._is_kept, totals[totals > 0]
        self._shape = len(totals), int(totals.max()) if len(totals) else 0
        places = (self._of_row * self._shape[1] + offsets)[:, None] + self._is_token.cumsum(dim=1) - 1
        self._places = places[self._is_token]
        last = is_last.nonzero().flatten()
        fields = {
            name: self._join(values) if field_of(name).per_token else values[last]
            for name, values in rows.fields.items()
        }
        self.joined = Rows(rows.ids[last], rows.prompt_ids[last], rows.prompt_lengths[last], totals, NO_TOKENS, fields)

    def spread(self, **fields: torch.Tensor) -> Rows:
        """The rows with fields of the trajectories added."""
        if self.joined is self.rows:
            return replace(self.rows, fields=self.rows.fields | fields)
        spread = {
            name: self._cut(values) if field_of(name).per_token else self._of_rows(values)
            for name, values in fields.items()
        }
        return replace(self.rows, fields=self.rows.fields | spread)

    def _join(self, values: torch.Tensor) -> torch.Tensor:
        """[B, R] -> [E, W]."""
        joined = values.new_zeros(self._shape)
        joined.view(-1)[self._places] = values[self._is_token]
        return joined

    def _of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """[E] -> [B], 0 for rows that are left out."""
        of_rows = values.new_zeros(len(self.rows))
        of_rows[self._is_kept] = values[self._of_row[self._is_kept]]
        return of_rows

    def _cut(self, values: torch.Tensor) -> torch.Tensor:
        """[E, W] -> [B, R]."""
        cut = values.new_zeros(self._is_token.shape)
        cut[self._is_token] = values.reshape(-1)[self._places]
        return cut
