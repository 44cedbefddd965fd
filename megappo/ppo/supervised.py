"""Losses of models that learn from examples, not from rollouts."""

from torch import Tensor
from torch.nn.functional import logsigmoid

from megappo.ppo.reductions import Metrics, Normaliser, Unreduced, aggregate


def nll_loss(
    log_probs: Tensor,
    response_mask: Tensor,
    normaliser: Normaliser | None = None,
    loss_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Return the negative log-likelihood of the responses, a mean over the tokens of the whole batch, in nats.

    Args:
        log_probs: [B, R], of the tokens of the responses, given all tokens before.
        response_mask: [B, R], 1 on tokens with a loss.
        normaliser: normaliser of the batch; None = counted from the mask.
        loss_weights: [B], factors of each row's losses, which do not change the counts. None = 1.
    Returns:
        This call's share of the mean, 0-dim: shares of all micro-batches and ranks add up to it. No metrics.
    Source: Ouyang et al. 2022 (InstructGPT), section 3.5: cross-entropy on demonstrations.
    """
    loss = aggregate(
        -log_probs,
        response_mask,
        "token-mean",
        normaliser=normaliser,
        loss_weights=loss_weights,
    )
    return loss, {"nll_loss": loss.detach()}


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    margins: Tensor,
    num_pairs: int,
    center_coef: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """Return the Bradley-Terry loss of pairs, -log sigmoid(chosen - rejected - margin), a mean over the batch's pairs.

    Args:
        chosen, rejected: [P] scores of the better and of the worse response to a prompt.
        margins: [P], by which the difference of the scores should exceed 0.
        num_pairs: pairs of the whole batch, by which sums are divided.
        center_coef: weight of the mean of (chosen + rejected)^2, which keeps scores around 0.
    Returns:
        This call's share of the mean, 0-dim, and shares of the means: shares of all micro-batches and ranks add up.
    Source: Ouyang et al. 2022 (InstructGPT), equation 1; Touvron et al. 2023 (Llama 2), equation 2, for the margin;
        Eisenstein et al. 2023, for centring.
    """
    differences = chosen - rejected
    loss = -logsigmoid(differences - margins).sum() / num_pairs
    center = (chosen + rejected).square().sum() / num_pairs
    metrics = {
        "bt_loss": loss,
        "center_loss": center,
        "accuracy": (differences > 0).sum() / num_pairs,
        "margin": differences.sum() / num_pairs,
        "score": (chosen + rejected).sum() / (2 * num_pairs),
    }
    return loss + center_coef * center, {name: metric.detach() for name, metric in metrics.items()}


def preference_metrics(differences: Tensor) -> Unreduced:
    """Return how well scores order held-out pairs.

    Args:
        differences: [P] float64, score of the chosen response minus score of the rejected one.
    Returns:
        Loss without margins, share of pairs in the right order, mean difference, and the expected calibration error of
        sigmoid(|difference|) as the probability that the order is right.
    Source: Guo et al. 2017, equation 3, for the calibration error.
    """
    return {
        "loss": (-logsigmoid(differences), "mean"),
        "accuracy": ((differences > 0).double(), "mean"),
        "margin": (differences, "mean"),
        "calibration_error": (differences, "calibration_error"),
    }
