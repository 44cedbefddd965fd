"""Number, mean and squared deviations of values; the moments of parts merge into the moments of the whole."""

from collections.abc import Sequence

import torch
from torch import Tensor

Moments = tuple[float, float, float]
"""Number of values, their mean, and the sum of their squared deviations from it."""


def moments(values: Tensor) -> Tensor:
    """Return the `Moments` of values [n] float64 as a tensor [3] on their device. n may be 0."""
    mean = values.sum() / max(len(values), 1)
    return torch.stack([values.new_tensor(len(values)), mean, (values - mean).square().sum()])


def explained_variance(residual: float, returns: float) -> float:
    """1 - residual / (returns + 1e-5): 1 = a perfect critic, 0 = no better than a constant.

    Args:
        residual, returns: variances over the tokens with mask 1, with ddof 1, of returns - values and of returns.
    Source: verl's critic/vf_explained_var.
    """
    return 1.0 - residual / (returns + 1e-5)


def merged_moments(parts: Sequence[Moments]) -> Moments:
    """Return the moments of several sets of values together.

    Source: Chan, Golub & LeVeque 1983, Algorithms for Computing the Sample Variance, equation 1.5.
    """
    count = sum(part_count for part_count, _, _ in parts)
    mean = sum(part_count * part_mean for part_count, part_mean, _ in parts) / max(count, 1)
    within = sum(part_squares for _, _, part_squares in parts)
    between = 0.0
    for part_count, part_mean, _ in parts:
        deviation = part_mean - mean
        between += part_count * deviation * deviation  # a power would overflow
    return count, mean, between + within
