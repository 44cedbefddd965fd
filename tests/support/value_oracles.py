"""Losses of value heads with several outputs and their gradients, in float64 and plain loops."""

import math
from collections.abc import Sequence

Found = tuple[float, list[float]]
"""Loss of a token, and its derivative by each output."""


def softmax(logits: Sequence[float]) -> list[float]:
    exps = [math.exp(logit - max(logits)) for logit in logits]
    return [one / sum(exps) for one in exps]


def cross_entropy(logits: Sequence[float], labels: Sequence[float]) -> Found:
    probs = softmax(logits)
    loss = -sum(label * math.log(prob) for label, prob in zip(labels, probs, strict=True))
    return loss, [prob - label for label, prob in zip(labels, probs, strict=True)]


def hl_gauss(logits: Sequence[float], target: float, centers: Sequence[float], width: float) -> Found:
    """As the code in Farebrother et al. 2024, appendix A, with v_min and v_max half a bin outside of the centers."""
    size = (centers[-1] - centers[0]) / (len(centers) - 1)
    target = min(max(target, centers[0]), centers[-1])
    support = [centers[0] - size / 2 + i * size for i in range(len(centers) + 1)]
    cdf = [math.erf((edge - target) / (math.sqrt(2) * width * size)) for edge in support]
    labels = [(cdf[i + 1] - cdf[i]) / (cdf[-1] - cdf[0]) for i in range(len(centers))]
    return cross_entropy(logits, labels)


def two_hot(logits: Sequence[float], target: float, centers: Sequence[float]) -> Found:
    """As Hafner et al. 2023 (DreamerV3), eq. 9: the classes around the target, by their distances to it."""
    target = min(max(target, centers[0]), centers[-1])
    labels = [0.0] * len(centers)
    for i in range(len(centers) - 1):
        low, high = centers[i], centers[i + 1]
        if low <= target <= high:
            labels[i], labels[i + 1] = (high - target) / (high - low), (target - low) / (high - low)
            break
    return cross_entropy(logits, labels)


def quantile(outputs: Sequence[float], target: float, kappa: float) -> Found:
    """As Dabney et al. 2018 (QR-DQN), eqs. 9 and 10, with the mean over quantiles in place of the sum, divided by kappa
    as in Dabney et al. 2018 (IQN), eq. 3."""
    loss, gradient, count = 0.0, [], len(outputs)
    for i, output in enumerate(outputs):
        error = target - output
        weight = abs((2 * i + 1) / (2 * count) - (error < 0))
        is_near = abs(error) <= kappa
        loss += weight * (error**2 / 2 / kappa if is_near else abs(error) - kappa / 2) / count
        gradient.append(-weight * (error / kappa if is_near else math.copysign(1.0, error)) / count)
    return loss, gradient
