"""Samples with given tokens."""

from collections.abc import Sequence
from typing import Any

from megappo.rollouts.sample_rows import Sample, Segment


def sample_of(
    prompt_index: int,
    sample_index: int,
    tokens: list[int],
    log_probs: Sequence[float | None],
    ending: Any = "stop",
    *,
    prompt: Sequence[int] = (5,),
) -> Sample:
    """Return a response to a prompt; the log-prob is None where an environment wrote the token."""
    segment = Segment(list(prompt), tokens=tokens, log_probs=list(log_probs))
    return Sample(prompt_index, sample_index, [segment], ending)
