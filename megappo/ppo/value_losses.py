"""Value losses: the error of a value head's outputs at each token; and the value that the outputs stand for.

The outputs are the value itself, the logits of classes whose centers are evenly spaced values, or quantiles.
`megappo.config.methods.VALUE_LOSSES` registers the losses, which take (`ValueInputs`, the critic section of the config)
and return the error of each token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from megappo.ppo.conventions import DEFAULT, Conventions

ERRORS = "value_errors"
"""Output of a value head that computes the value loss of each token."""
NO_CLASSES = torch.empty(0)
HUBER_DELTA, KAPPA = 1.0, 0.01
"""critic.huber_delta where it is null: of huber, and of quantile. Within kappa of the returns the quantile loss finds
expectiles, whose mean is not the mean of the returns: for scores of 0 and 1, 10 % of them 1, it is 0.18 at kappa 1, the
paper's, whose returns reach hundreds."""


@dataclass(frozen=True)
class ValueInputs:
    """Inputs of a value loss, for tokens of any shape [...], float32.

    Attributes:
        outputs: [..., K] of the value head; the only input that gets a gradient.
        returns: [...], targets.
        centers: [K], values of the classes, evenly spaced; empty for other outputs.
        conventions: value_loss_factor scales the squared error.
    """

    outputs: Tensor
    returns: Tensor
    centers: Tensor = NO_CLASSES
    conventions: Conventions = DEFAULT

    @property
    def width(self) -> Tensor:
        """Distance between the centers of neighbouring classes, 0-dim."""
        return (self.centers[-1] - self.centers[0]) / (len(self.centers) - 1)

    @property
    def targets(self) -> Tensor:
        """Returns, clamped to the range of the centers."""
        return torch.clamp(self.returns, self.centers[0], self.centers[-1])


def values_of(outputs: Tensor, centers: Tensor = NO_CLASSES) -> Tensor:
    """Return the values, [...], that outputs [..., K] stand for: the mean of the classes' distribution, or of the
    quantiles. A single output is the value itself."""
    if not len(centers):
        return outputs.mean(dim=-1)
    return (outputs.softmax(dim=-1) * centers).sum(dim=-1)


def token_errors(inputs: ValueInputs, config: Any) -> dict[str, Tensor]:
    """Return the loss of each token, under `ERRORS`, and metrics of each token's distribution.

    The metrics, [...], detached: vf_std, its standard deviation; for classes vf_entropy, its entropy in nats, and
    vf_outside, 1 where the return is more than half a class beyond all classes.
    """
    outputs = inputs.outputs.detach()
    found = {ERRORS: config.method.function(inputs, config)}
    if not len(inputs.centers):
        return found | {"vf_std": outputs.std(dim=-1, correction=0)}
    log_probs = outputs.log_softmax(dim=-1)
    probs = log_probs.exp()
    deviations = inputs.centers - values_of(outputs, inputs.centers)[..., None]
    return found | {
        "vf_std": (probs * deviations.square()).sum(dim=-1).sqrt(),
        "vf_entropy": -(probs * log_probs).sum(dim=-1),
        "vf_outside": ((inputs.returns - inputs.targets).abs() > inputs.width / 2).float(),
    }


def mse(inputs: ValueInputs, config: Any) -> Tensor:
    """Compute value_loss_factor x the squared error."""
    return inputs.conventions.value_loss_factor * (inputs.outputs[..., 0] - inputs.returns).square()


def huber(inputs: ValueInputs, config: Any) -> Tensor:
    """Compute Huber's e^2 / 2 up to |e| = huber_delta and huber_delta (|e| - huber_delta / 2) beyond, which no
    convention scales."""
    delta = config.huber_delta or HUBER_DELTA
    return huber_loss(inputs.outputs[..., 0], inputs.returns, reduction="none", delta=delta)


def hl_gauss(inputs: ValueInputs, config: Any) -> Tensor:
    """Compute the cross-entropy with a Gaussian around the return, cut off at the outer edges of the classes.

    A class reaches half a distance to either side of its center. The Gaussian's standard deviation is hl_gauss_width
    distances.

    Source: Farebrother et al. 2024 (Stop Regressing, arXiv 2403.03950), section 3.1, whose v_min and v_max are the
        outer edges and whose sigma is 0.75 distances.
    """
    width = inputs.width
    edges = torch.cat([inputs.centers - width / 2, inputs.centers[-1:] + width / 2])
    below = torch.special.ndtr((edges - inputs.targets[..., None]) / (config.hl_gauss_width * width))
    labels = below.diff(dim=-1) / (below[..., -1:] - below[..., :1])
    return -(labels * inputs.outputs.log_softmax(dim=-1)).sum(dim=-1)


def two_hot(inputs: ValueInputs, config: Any) -> Tensor:
    """Compute the cross-entropy with the two classes around the return, weighted so that their mean is the return.

    Source: Schrittwieser et al. 2020 (MuZero), appendix F, and Hafner et al. 2023 (DreamerV3), eq. 9, without their
        transformations of the return.
    """
    places = (inputs.targets - inputs.centers[0]) / inputs.width
    lower = places.floor().clamp(0, len(inputs.centers) - 2)
    share = places - lower
    pair = torch.stack([lower, lower + 1], dim=-1).long()
    log_probs = inputs.outputs.log_softmax(dim=-1).gather(-1, pair)
    return -((1 - share) * log_probs[..., 0] + share * log_probs[..., 1])


def quantile(inputs: ValueInputs, config: Any) -> Tensor:
    """Compute the quantile Huber loss, averaged over the quantiles (i + 1/2) / K, where the papers sum over them.

    Source: Dabney et al. 2018 (QR-DQN), eqs. 9 and 10, divided by kappa as in Dabney et al. 2018 (IQN), eq. 3, so that
        a small kappa does not make the loss small; kappa is huber_delta.
    """
    kappa = config.huber_delta or KAPPA
    outputs = inputs.outputs
    count = outputs.shape[-1]
    levels = (torch.arange(count, device=outputs.device) + 0.5) / count
    errors = inputs.returns[..., None] - outputs
    weights = (levels - (errors.detach() < 0).float()).abs()
    return (weights * huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=kappa)).mean(dim=-1) / kappa
