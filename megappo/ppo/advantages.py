"""Rewards per token, advantages, returns, whitening, explained variance. Tensors are [B, R] float32, padded."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megappo.ppo.conventions import DEFAULT, Whitening
from megappo.ppo.gae import gae as gae  # config.methods and people import it from here, as they do `whiten`
from megappo.ppo.reductions import add_to_last_token, check_finite, check_has_tokens, moments_over_ranks

Estimates = tuple[Tensor, Tensor]


@torch.no_grad()
def estimate(estimator: Callable[..., Estimates], **inputs: Any) -> Estimates:
    """Call an estimator with the inputs it takes and return its advantages and returns, neither whitened.

    Args:
        estimator: the function of an entry in `megappo.config.methods.ESTIMATORS`.
        inputs: everything any estimator may take, by argument name; None counts as missing.

    Raises:
        ValueError: an input that the estimator requires is missing.
    """
    parameters = inspect.signature(estimator).parameters
    given = {name: value for name, value in inputs.items() if name in parameters and value is not None}
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    missing = [name for name in required if name not in given]
    if missing:
        raise ValueError(f"advantage estimator {estimator.__name__} needs {', '.join(missing)}")
    return estimator(**given)


def compute_token_level_rewards(
    scores: Tensor, response_mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Put each response's score on its last token with mask 1 and subtract the KL penalty from every token.

    Args:
        scores: [B] float32, one per response.
        response_mask: [B, R], 1 on tokens the policy wrote.
        kl: [B, R] KL estimate of each token; None = no penalty.
        kl_coef: weight of the penalty, in score per nat.

    Returns:
        token_level_rewards, [B, R] float32, 0 where the mask is 0.

    Raises:
        ValueError: a response has no token with mask 1, so its score would be lost.
        FloatingPointError: a score is not finite.
    Source: Ouyang et al. 2022 (InstructGPT), eq. 2.
    """
    valid = response_mask.bool()
    check_has_tokens(response_mask)
    check_finite("scores", scores)
    penalty = torch.zeros_like(response_mask, dtype=torch.float32) if kl is None else kl_coef * kl.float()
    rewards = torch.where(valid, -penalty, 0.0)
    return add_to_last_token(rewards, valid, scores)


def whiten(
    x: Tensor,
    mask: Tensor,
    shift_mean: bool = True,
    *,
    group: ProcessGroup | None = None,
    whitening: Whitening = DEFAULT.whitening,
) -> Tensor:
    """Scale x to variance 1 and, with shift_mean, shift it to mean 0, over all tokens with mask 1.

    Args:
        x: [B, R] float32. mask: [B, R].
        shift_mean: False keeps the mean.
        group: ranks whose tokens are whitened together; each must call, with its own rows (none is allowed).
            None = the tokens given here alone, even where torch.distributed is initialised.
        whitening: by default ddof 1 and eps 1e-8, added to the variance.

    Returns:
        (x - mean) * rsqrt(var + eps), or rsqrt(max(var, eps)); [B, R] float32, 0 where the mask is 0.

    The variance of fewer than two tokens is 0, so a single one becomes 0 with shift_mean and keeps its value without,
    as in slime. verl raises there.

    Raises:
        FloatingPointError: a token with mask 1 is not finite, on every rank of the group alike.
    Source: verl's masked_whiten; variance as of `moments_over_ranks`, in float64.
    """
    valid = mask.bool()
    count, mean, squares = moments_over_ranks(x.detach().double()[valid], group)
    if not math.isfinite(mean):
        raise FloatingPointError(f"the {int(count)} tokens with mask 1 are not all finite")
    variance, eps = squares / max(count - whitening.ddof, 1), whitening.eps
    scale = (max(variance, eps) if whitening.clamps_variance else variance + eps) ** -0.5
    whitened = (x.double() - mean) * scale
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(valid, whitened, 0.0).float()


def explained_variance(residual: float, returns: float) -> float:
    """1 - residual / (returns + 1e-5): 1 = a perfect critic, 0 = no better than a constant.

    Args:
        residual, returns: variances over the tokens with mask 1, with ddof 1, of returns - values and of returns.
    Raises:
        FloatingPointError: one is not finite.
    Source: verl's critic/vf_explained_var.
    """
    if not (math.isfinite(residual) and math.isfinite(returns)):
        raise FloatingPointError(
            f"the variances of returns - values and of returns are {residual} and {returns}: the tokens with mask 1 "
            "are not all finite, or fewer than 2"
        )
    return 1.0 - residual / (returns + 1e-5)
