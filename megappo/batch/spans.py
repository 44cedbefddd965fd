"""Spans of what lies in one flat tensor, such as the tokens of rows laid end to end."""

import torch


def positions_in(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[T] int64: the positions in spans that begin at `starts`, one span after the other; [b] int64 both."""
    here = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) + (starts - here).repeat_interleave(lengths)


def taken(flat: torch.Tensor, lengths: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Of spans laid end to end those at `index`, in this order, laid end to end."""
    starts = lengths.cumsum(0) - lengths
    return flat[positions_in(starts[index], lengths[index])]
