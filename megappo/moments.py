"""Number, mean and squared deviations of values, of which parts become those of all."""

from collections.abc import Sequence

import torch

Moments = tuple[float, float, float]
"""How many values there are, their mean, and the sum of their squared deviations from it."""


def moments(values: torch.Tensor) -> torch.Tensor:
    """`Moments` of values [n] float64, on their device: [3]. n may be 0."""
    mean = values.sum() / max(len(values), 1)
    return torch.stack([values.new_tensor(len(values)), mean, (values - mean).square().sum()])


def merged_moments(parts: Sequence[Moments]) -> Moments:
    """Of several sets of values together.

    Source: Chan, Golub & LeVeque 1983, Algorithms for Computing the Sample Variance, equation 1.5.
    """
    count = sum(count for count, _, _ in parts)
    mean = sum(count * mean for count, mean, _ in parts) / max(count, 1)
    deviations = [(count, of_part - mean) for count, of_part, _ in parts]
    between = sum(count * deviation * deviation for count, deviation in deviations)  # a power would overflow
    return count, mean, between + sum(squares for _, _, squares in parts)
