"""Losses of models that learn from examples, not from rollouts."""

from torch import Tensor

from megappo.ppo.reductions import Metrics, Normaliser, aggregate


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
        normaliser: of the batch; None = counted from the mask.
        loss_weights: [B], factors of each row's losses, which do not change the counts. None = 1.
    Returns:
        This call's share of the mean, 0-dim: shares of all micro-batches and ranks add up to it. No metrics.
    Source: Ouyang et al. 2022 (InstructGPT), section 3.5: cross-entropy on demonstrations.
    """
    loss = aggregate(-log_probs, response_mask, "token-mean", normaliser=normaliser, loss_weights=loss_weights)
    return loss, {"nll_loss": loss.detach()}
