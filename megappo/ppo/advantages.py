"""Rewards per token, advantages and returns by generalised advantage estimation (GAE) over tokens or turns, whitening,
explained variance. Tensors are [B, R] float32, padded."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from megappo.ppo.conventions import DEFAULT, Whitening
from megappo.ppo.reductions import (
    add_to_last_token,
    check_finite,
    check_has_tokens,
    gather_over_ranks,
    moments_over_ranks,
)

Estimates = tuple[Tensor, Tensor]
BLOCK = 16
"""Tokens whose discounted sums are one product with a triangular matrix; a Python loop goes from block to block."""


@torch.no_grad()
def estimate(estimator: Callable[..., Estimates], **inputs: Any) -> Estimates:
    """Call an estimator with the inputs it takes and return its advantages and returns, neither whitened.

    Args:
        estimator: the function of an entry in `megappo.config.methods.ESTIMATORS`.
        inputs: everything any estimator may take, by argument name; None counts as missing.

    Raises:
        TypeError: an input that the estimator requires is missing.
    """
    names = inspect.signature(estimator).parameters
    return estimator(**{name: value for name, value in inputs.items() if name in names and value is not None})


def compute_token_level_rewards(
    scores: Tensor,
    response_mask: Tensor,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
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


@torch.no_grad()
def gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    *,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns (advantages + values), neither whitened.

    Args:
        token_level_rewards, values: [B, R] float32.
        response_mask: [B, R], 1 on tokens the policy wrote. A token with mask 0 contributes nothing, whatever it holds:
            the next value and the running sum are carried through it, without discount.
        gamma: discount per token.
        lam: lambda per token; [B] for one per response.
        bootstrap_values: [B], the value after each response's last token with mask 1. None = 0.

    Returns:
        (advantages, returns), each [B, R] float32, 0 where the mask is 0.

    Raises:
        FloatingPointError: a reward or value on a token with mask 1, or a bootstrap value, is not finite.
    Source: Schulman et al. 2016, eq. 16; masked tokens as in verl's compute_gae_advantage_return, and as in SAO's
        skip-observation GAE (Hou et al. 2026, arXiv 2607.07508, eqs. 4 and 5).
    """
    # On a GPU float64, which TF32 and autocast do not affect.
    dtype = torch.float32 if values.device.type == "cpu" else torch.float64
    lam = torch.as_tensor(lam, dtype=torch.float64, device=values.device)
    valid = response_mask.bool()
    lengths = valid.sum(dim=1)
    places = valid.flatten().nonzero().squeeze(1)
    rewards, baselines = (x.flatten().index_select(0, places).to(dtype) for x in (token_level_rewards, values))
    # returns[t] = rewards[t] + gamma * targets[t + 1], where targets = (1 - lam) * values + lam * returns, and so
    # targets[t] = (1 - lam) * values[t] + lam * rewards[t] + gamma * lam * targets[t + 1].
    weights = lam.repeat_interleave(lengths) if lam.dim() else lam
    terms = torch.lerp(baselines, rewards, weights.to(dtype))
    found = rewards.add_(_next_targets(terms, lengths, gamma * lam, bootstrap_values), alpha=gamma)
    advantages, returns = torch.zeros(2, *values.shape, device=values.device)
    returns.view(-1).index_copy_(0, places, found.float())
    advantages.view(-1).index_copy_(0, places, found.sub_(baselines).float())
    check_finite("rewards, values or bootstrap_values", advantages, valid)
    return advantages, returns


def _next_targets(
    terms: Tensor,
    lengths: Tensor,
    decay: Tensor,
    last: Tensor | None,
) -> Tensor:
    """Return the target after each token, targets[t + 1] with targets[t] = terms[t] + decay * targets[t + 1].

    Args:
        terms: terms of the tokens of all responses, end to end.
        lengths: [B] int64, tokens per response.
        last: [B], the target after each response's last token; None = 0.
    """
    # Each response's terms begin a row, and at least one 0 follows.
    width = (int(lengths.max()) // BLOCK + 1) * BLOCK if len(lengths) else BLOCK
    is_packed = torch.arange(width, device=terms.device) < lengths[:, None]
    places = is_packed.flatten().nonzero().squeeze(1)
    packed = terms.new_zeros(is_packed.shape)
    packed.view(-1).index_copy_(0, places, terms)
    if last is not None:
        packed[torch.arange(len(lengths), device=terms.device), lengths] = last.to(terms.dtype)
    with _full_precision():
        targets = _discounted_sums(packed, decay)
    return targets.flatten()[1:].index_select(0, places)


def _discounted_sums(x: Tensor, decay: Tensor) -> Tensor:
    """Return y[t] = x[t] + decay * y[t + 1] along each row; overwrites x.

    Args:
        x: [B, W], W a multiple of BLOCK.
        decay: float64, 0-dim or [B]. What one block adds to the block before is summed in float64.
    Source: Blelloch 1990 (Prefix sums and their applications), section 1.4: first-order recurrences as scans.
    """
    offsets = torch.arange(BLOCK, device=x.device)
    distances = (offsets[:, None] - offsets).clamp(min=0)
    weights = (decay[..., None, None] ** distances).tril().to(x.dtype)  # of position i in the sum from position j on

    num_blocks = x.shape[1] // BLOCK
    blocks = x.unflatten(1, (num_blocks, BLOCK))
    firsts = (blocks @ weights[..., :1]).squeeze(-1).double()  # the sum from the beginning of each block on
    for block in reversed(range(num_blocks - 1)):
        firsts[:, block].addcmul_(firsts[:, block + 1], decay**BLOCK)

    carried = decay[..., None] * firsts[:, 1:]
    blocks[:, :-1, -1] += carried.to(x.dtype)
    return blocks @ weights


@contextmanager
def _full_precision() -> Iterator[None]:
    """Take products of float32 tensors on the CPU in float32, whatever matmul precision or autocast is set."""
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # oneDNN alone would round to bfloat16
    try:
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.backends.mkldnn.enabled = enabled


@torch.no_grad()
def gae_over_turns(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    turns: Tensor,
    gamma: float,
    lam: float | Tensor,
    *,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `gae` with turns as actions: each turn has one reward, one value and one advantage.

    A turn's reward is the sum of its tokens' rewards; its value is the one before its first token. Its advantage and
    return are written to each of its tokens with mask 1.

    Args:
        token_level_rewards, values, response_mask, bootstrap_values: see `gae`.
        turns: [B, R], the turn of each token with mask 1, from 1, ascending.
        gamma: discount per turn.
        lam: lambda per turn; [B] for one per response.

    Returns, Raises: see `gae`.
    Source: Li et al. 2025 (Turn-PPO, arXiv 2512.17008). RAGEN's and VAGEN's bi-level GAE also gives the tokens of a
        turn advantages of their own.
    """
    valid = response_mask.bool()
    numbers = torch.where(valid, turns.long(), 0)
    num_turns = int(numbers.max()) if numbers.numel() else 0
    # Column 0 takes the tokens that belong to no turn; its mask is 0.
    zeros = values.new_zeros(len(values), 1 + num_turns, dtype=torch.float32)
    rewards = zeros.scatter_add(1, numbers, torch.where(valid, token_level_rewards.float(), 0.0))
    mask = zeros.scatter_add(1, numbers, valid.float()).clamp(max=1)

    latest, _ = numbers.cummax(dim=1)
    previous = pad(latest[:, :-1], (1, 0))
    first_values = torch.where(valid & (numbers > previous), values.float(), 0.0)
    turn_values = zeros.scatter_add(1, numbers, first_values)
    advantages, returns = gae(rewards, turn_values, mask, gamma, lam, bootstrap_values=bootstrap_values)
    return advantages.gather(1, numbers), returns.gather(1, numbers)


def length_adaptive_lam(response_mask: Tensor, alpha: float) -> Tensor:
    """Return a lambda per response that approaches 1 with its length: 1 - 1 / (alpha * length), within [0, 1].

    Args:
        response_mask: [B, R], 1 on tokens the policy wrote; length counts them.
        alpha: VAPO takes 0.05, so that a response of 20 tokens or fewer has lambda 0 and one of 2000 has 0.99.

    Returns:
        [B] float32, 0 for a response without any token.
    Source: VAPO (Yue et al. 2025), Length-adaptive GAE: the sum of lambda's powers is proportional to the length.
    """
    lengths = response_mask.bool().sum(dim=1).double()
    return (1 - 1 / (alpha * lengths)).clamp(0.0, 1.0).float()


def lowest_share(x: Tensor, mask: Tensor, share: float, *, group: ProcessGroup | None = None) -> Tensor:
    """Return [B, R] bool: the tokens with mask 1 whose x is among the lowest, floor(share x tokens) of them at most.

    Tokens that are equal to the first one beyond are left out, so that none is chosen where all are equal.

    Args:
        x, mask: [B, R].
        group: as of `whiten`.
    """
    valid = mask.bool()
    counts = gather_over_ranks(valid.sum(), group)
    own = pad(x[valid], (0, int(counts.max()) + 1 - int(valid.sum())), value=math.inf)
    ordered, _ = gather_over_ranks(own, group).flatten().sort()
    return valid & (x < ordered[int(share * int(counts.sum()))])


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
        group: ranks whose tokens are whitened together; each must call, with its own rows (possibly none).
            None = the tokens given here alone, even where torch.distributed is initialised.
        whitening: how advantages are whitened; default: ddof 1 and eps 1e-8, added to the variance.

    Returns:
        (x - mean) * rsqrt(var + eps), or rsqrt(max(var, eps)); [B, R] float32, 0 where the mask is 0.

    The variance of fewer than two tokens is 0, so a single one becomes 0 with shift_mean and keeps its value without.

    Raises:
        FloatingPointError: a token with mask 1 is not finite, on every rank of the group alike.
    Source: verl's masked_whiten; variance as of `moments_over_ranks`, in float64.
    """
    valid = mask.bool()
    count, mean, squares = moments_over_ranks(x.detach().double()[valid], group)
    if not math.isfinite(mean):
        raise FloatingPointError(f"the {int(count)} tokens with mask 1 are not all finite")
    variance = squares / max(count - whitening.ddof, 1)
    eps = whitening.eps
    scale = (max(variance, eps) if whitening.clamps_variance else variance + eps) ** -0.5
    whitened = (x.double() - mean) * scale
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(valid, whitened, 0.0).float()
