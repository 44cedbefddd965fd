"""Bitwise differences between two tensors."""

from collections.abc import Iterable
from math import isnan

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def difference_of(found: torch.Tensor, other: torch.Tensor) -> str:
    """Describe how two tensors differ; "" if they are bitwise equal."""
    for what in ("shape", "dtype"):
        if getattr(found, what) != getattr(other, what):
            return f"{what} {_shown(getattr(found, what))} against {_shown(getattr(other, what))}"
    return difference_of_parts([(found, other)])


def difference_of_parts(pairs: Iterable[Pair]) -> str:
    """Compare two tensors of the same shape and dtype that are read in parts, one pair of parts at a time."""
    differing = total = 0
    largest = 0.0
    for found, other in pairs:
        found, other = found.contiguous().flatten(), other.contiguous().flatten()
        differs = (found.view(torch.uint8) != other.view(torch.uint8)).unflatten(0, (found.numel(), -1)).any(dim=1)
        total += found.numel()
        if differs.any():
            differing += int(differs.sum())
            distance = (found[differs].double() - other[differs].double()).abs().max().item()
            largest = distance if isnan(distance) else max(largest, distance)
    return f"{differing} of {total} elements differ, by up to {largest:.3g}" if differing else ""


def _shown(value: object) -> str:
    return str([*value]) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
