"""Log-probs, entropy and KL of distributions over a sharded vocabulary, from hidden states: there never are logits of
more than a block of words, in either direction."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megappo.architecture.parameters import LOGITS_AT_A_TIME
from megappo.models import head_kernels

ALIGNED_WORDS = 128
"""Blocks are multiples of this where they are larger: with rows of an odd number of words cuBLAS has no kernel of
Hopper's, and on an H100 the head took half of an update of 0.6 billion parameters."""
NO_LOGIT = -1e30
"""The maximum of no logits: exp() of it is exactly 0, and unlike -inf it leaves no NaN in 0 x inf."""


def vocab_parallel_log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    at_a_time: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each token's distribution, softmax(hidden @ weight.T / temperature).

    The backward pass computes the logits once more, a block of words at a time, and adds the weight's gradient to its
    `main_grad`, where Megatron has made one that is not reduced before all passes are done. Collectives: one gathering
    of [4, T] in the forward pass, one sum of the hidden states' gradient in the backward pass.

    Args:
        hidden: [T, H], the same on every rank of the group, as its gradient will be.
        weight: [V/tp, H], of hidden's dtype: this rank's contiguous shard of the padded vocabulary, rank order.
        targets: [T] int64 token ids, the same on every rank of the group.
        group: ranks that hold the shards; every one of them calls.
        vocab_size: true vocabulary; words from there on are padding, have no probability and get gradient 0.
        temperature: divides the logits.
        at_a_time: logits worked on at a time, those of all tokens for as many words; LOGITS_AT_A_TIME of the device by
            default. It changes the rounding of the result only.
    Returns:
        log_probs [T] and entropy [T], float32 (float64 for float64), in nats, the same on every rank. A target outside
        [0, vocab_size) has log-prob NaN.
    Raises:
        ValueError: the shapes do not fit each other or the vocabulary.
    Source: d log p(y) / dx = onehot(y) - p and d H / dx = -p (log p + H). The block-wise softmax: Milakov and
        Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    _check(hidden, weight)
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"expected hidden [T, H] and targets [T], got {[*hidden.shape]} and {[*targets.shape]}")
    vocabulary = _Vocabulary.of(hidden, weight, group, vocab_size, temperature, at_a_time)
    return _LogProbsAndEntropy.apply(hidden, weight, targets, vocabulary)


def vocab_parallel_kl(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ref_hidden: torch.Tensor,
    ref_weight: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    at_a_time: int | None = None,
) -> torch.Tensor:
    """KL(policy || reference) of each token's distribution, softmax(hidden @ weight.T / temperature), over the whole
    vocabulary. Gradients and collectives are as in `vocab_parallel_log_probs_and_entropy`.

    Args:
        hidden: [T, H] and weight [V/tp, H], the policy's, as in `vocab_parallel_log_probs_and_entropy`.
        ref_hidden: [T, H'] and ref_weight [V/tp, H'], the reference's, sharded in the same way; without a gradient.
        group, vocab_size, temperature, at_a_time: as in `vocab_parallel_log_probs_and_entropy`; for both distributions.
    Returns:
        kl [T], float32 (float64 for float64), in nats, the same on every rank; not below 0, up to rounding.
    Raises:
        ValueError: the shapes do not fit each other or the vocabulary.
    Source: KL = sum p (log p - log q), with p the policy's and q the reference's; d KL / dx = p (log p - log q - KL).
    """
    _check(hidden, weight)
    _check(ref_hidden, ref_weight)
    if len(ref_hidden) != len(hidden) or len(ref_weight) != len(weight):
        raise ValueError(
            f"expected as many tokens and words of both, got {len(hidden)} and {len(ref_hidden)} tokens, {len(weight)} "
            f"and {len(ref_weight)} words; the reference must have the policy's vocabulary and layout"
        )
    vocabulary = _Vocabulary.of(hidden, weight, group, vocab_size, temperature, at_a_time)
    return _FullKL.apply(hidden, weight, ref_hidden.detach(), ref_weight.detach(), vocabulary)


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocabulary: "_Vocabulary"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        add = head_kernels.add_sums if head_kernels.has_kernels(hidden) else add_sums
        sums = vocabulary.no_sums(4, [0], hidden)
        for words in vocabulary.blocks():
            x = torch.mm(hidden, weight[words].T)
            sums = add(sums, x, vocabulary.columns(words, targets), vocabulary.temperature)
        shards = vocabulary.of_all_shards(sums)
        maximum, exp_sum, exp_shifted_sum = _joined(shards[:, :3])
        log_exp_sum = exp_sum.log()
        # With s = x - max and Z = sum exp(s): log p = s - log Z, and H = log Z - sum(exp(s) s) / Z.
        entropy = log_exp_sum - exp_shifted_sum / exp_sum
        known = (targets >= 0) & (targets < vocabulary.size)
        log_probs = torch.where(known, shards[:, 3].sum(0) - maximum - log_exp_sum, torch.nan)
        ctx.save_for_backward(hidden, weight, targets, maximum + log_exp_sum, entropy)
        ctx.vocabulary = vocabulary
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        hidden, weight, targets, log_normaliser, entropy = ctx.saved_tensors
        vocabulary = ctx.vocabulary
        grad_block = head_kernels.gradient if head_kernels.has_kernels(hidden) else gradient
        per_token = [one.contiguous() for one in (log_normaliser, entropy, *grads)]

        def grad_logits(words: slice) -> torch.Tensor:
            x = torch.mm(hidden, weight[words].T)
            return grad_block(x, vocabulary.columns(words, targets), *per_token, vocabulary.temperature)

        return *_gradients(ctx, hidden, weight, grad_logits), None, None


def add_sums(sums: torch.Tensor, logits: torch.Tensor, columns: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the sums over a block of words and all blocks before it. May overwrite its arguments.

    Args:
        sums: [4, T], of the blocks before: the maximum of x = logits / temperature; of s = x - maximum: sum exp(s) and
            sum exp(s) s; the target's x, or 0.
        logits: [T, block].
        columns: [T] int64, the target's column in the block; outside [0, block) if it is in another block.
    """
    x = _divided(logits, temperature)
    here = (columns >= 0) & (columns < x.shape[1])
    target = x.gather(1, torch.where(here, columns, 0)[:, None])[:, 0] * here
    joined = _joined(torch.stack([sums[:3], _sums(x)]))
    return torch.cat([joined, sums[3:] + target])


def gradient(
    logits: torch.Tensor,
    columns: torch.Tensor,
    log_normaliser: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient of a block of logits, [T, block]. May overwrite its arguments.

    Args:
        logits, columns: as in `add_sums`.
        log_normaliser: [T], log sum exp(x) over all words.
        entropy: [T], of each token's distribution.
        grad_log_probs, grad_entropy: [T], the loss's gradient of the target's log-prob and of the entropy.
    """
    log_p = _divided(logits, temperature).sub_(log_normaliser[:, None])
    p = log_p.exp()
    of_target, of_entropy = grad_log_probs / temperature, grad_entropy / temperature
    grad = log_p.add_(entropy[:, None]).mul_(of_entropy[:, None]).add_(of_target[:, None]).mul_(p).neg_()
    here = (columns >= 0) & (columns < grad.shape[1])
    return grad.scatter_add_(1, torch.where(here, columns, 0)[:, None], (of_target * here)[:, None])


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        ref_hidden: torch.Tensor,
        ref_weight: torch.Tensor,
        vocabulary: "_Vocabulary",
    ) -> torch.Tensor:
        sums = vocabulary.no_sums(5, [0, 3], hidden)
        for words in vocabulary.blocks():
            x, y = vocabulary.logits(hidden, weight, words), vocabulary.logits(ref_hidden, ref_weight, words)
            sums = _kl_joined(torch.stack([sums, _kl_sums(x, y)]))
        maximum, exp_sum, exp_ratio_sum, ref_maximum, ref_exp_sum = _kl_joined(vocabulary.of_all_shards(sums))
        # With s = x - max and Z = sum exp(s), and u and Z' of the reference: KL = E_p[s - u] - log Z + log Z'.
        kl = exp_ratio_sum / exp_sum - exp_sum.log() + ref_exp_sum.log()
        log_normalisers = maximum + exp_sum.log(), ref_maximum + ref_exp_sum.log()
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, *log_normalisers, kl)
        ctx.vocabulary = vocabulary
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: torch.Tensor) -> tuple:
        hidden, weight, ref_hidden, ref_weight, log_normaliser, ref_log_normaliser, kl = ctx.saved_tensors
        vocabulary = ctx.vocabulary

        def grad_logits(words: slice) -> torch.Tensor:
            log_p = vocabulary.logits(hidden, weight, words).sub_(log_normaliser[:, None])
            log_q = vocabulary.logits(ref_hidden, ref_weight, words).sub_(ref_log_normaliser[:, None])
            p = log_p.exp()
            return log_p.sub_(log_q).sub_(kl[:, None]).mul_(grad_kl[:, None] / vocabulary.temperature).mul_(p)

        return *_gradients(ctx, hidden, weight, grad_logits), None, None, None


def _gradients(
    ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, grad_logits: Callable[[slice], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of hidden, whole, and of weight; None for one that is in the weight's `main_grad` already, or frozen.

    Args:
        grad_logits: that of a block of words, [T, block], divided by the temperature.
    """
    sums = torch.zeros_like(hidden, dtype=_wide(hidden))
    # What is reduced as soon as autograd has it must come from autograd.
    is_added_here = ctx.needs_input_grad[1] and not getattr(weight, "is_reduced_early", False)
    into = getattr(weight, "main_grad", None) if is_added_here else None
    returned = torch.zeros_like(weight) if ctx.needs_input_grad[1] and into is None else None
    into = returned if into is None else into
    for words in ctx.vocabulary.blocks():
        grad = grad_logits(words).to(hidden.dtype)
        _add_product(sums, grad, weight[words])
        if into is not None:
            _add_product(into[words], grad.T, hidden)
    if ctx.vocabulary.group.size() > 1:
        dist.all_reduce(sums, group=ctx.vocabulary.group)
    return sums.to(hidden.dtype), returned


@dataclass(frozen=True)
class _Vocabulary:
    """This rank's words [first, first + num_words) without padding, of which logits are computed a block at a time."""

    group: dist.ProcessGroup
    size: int
    temperature: float
    first: int
    num_words: int
    block: int

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        size: int,
        temperature: float,
        at_a_time: int | None,
    ) -> "_Vocabulary":
        """ValueError where all shards together are smaller."""
        if len(weight) * group.size() < size:
            raise ValueError(
                f"{group.size()} shards of {len(weight)} words hold fewer than the {size} of vocab_size; "
                "pass the model's true vocabulary size"
            )
        first = group.rank() * len(weight)
        block = max((at_a_time or LOGITS_AT_A_TIME[hidden.device.type]) // max(len(hidden), 1), 1)
        if block > ALIGNED_WORDS:
            block -= block % ALIGNED_WORDS
        return cls(group, size, temperature, first, min(max(size - first, 0), len(weight)), block)

    def blocks(self) -> Iterator[slice]:
        for start in range(0, self.num_words, self.block):
            yield slice(start, min(start + self.block, self.num_words))

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, words: slice) -> torch.Tensor:
        """New logits of a block of words, divided by the temperature, [T, block] float32 (float64 stays)."""
        return _divided(torch.mm(hidden, weight[words].T), self.temperature)

    def columns(self, words: slice, targets: torch.Tensor) -> torch.Tensor:
        """The targets' columns in a block, [T] int64; outside [0, block) where they are in another."""
        return targets - self.first - words.start

    def no_sums(self, kinds: int, maxima: Sequence[int], hidden: torch.Tensor) -> torch.Tensor:
        """The sums over no words, [kinds, T], of which some are maxima."""
        sums = hidden.new_zeros(kinds, len(hidden), dtype=_wide(hidden))
        sums[maxima] = NO_LOGIT
        return sums

    def of_all_shards(self, sums: torch.Tensor) -> torch.Tensor:
        """Every rank's sums [kinds, T], as [tp, kinds, T]."""
        shards = sums.new_empty(self.group.size(), *sums.shape)
        dist.all_gather([*shards], sums, group=self.group)
        return shards


def _divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Logits / temperature in float32 (float64 stays). Overwrites logits that have that dtype already."""
    x = logits.to(_wide(logits))
    return x if temperature == 1 else x.div_(temperature)


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Return max x, sum exp(s) and sum exp(s) s for logits x [T, block] and s = x - max x; [3, T]. Overwrites x."""
    maximum = x.amax(-1)
    exp = x.sub_(maximum[:, None]).exp()
    return torch.stack([maximum, exp.sum(-1), x.mul_(exp).sum(-1)])


def _joined(sums: torch.Tensor) -> torch.Tensor:
    """Join the `_sums` of several blocks, [n, 3, T], to those of one block of all their words, [3, T]."""
    maxima, exp_sums, exp_shifted_sums = sums.unbind(1)
    maximum = maxima.amax(0)
    shift = maxima - maximum
    scale = shift.exp()
    return torch.stack([maximum, (scale * exp_sums).sum(0), (scale * (exp_shifted_sums + shift * exp_sums)).sum(0)])


def _kl_sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return max x, sum exp(s), sum exp(s) (s - u), max y and sum exp(u), [5, T], for logits x and the reference's y
    [T, block], with s = x - max x and u = y - max y. Overwrites both."""
    maximum, ref_maximum = x.amax(-1), y.amax(-1)
    exp = x.sub_(maximum[:, None]).exp()
    ref_exp_sum = y.sub_(ref_maximum[:, None]).exp().sum(-1)
    return torch.stack([maximum, exp.sum(-1), x.sub_(y).mul_(exp).sum(-1), ref_maximum, ref_exp_sum])


def _kl_joined(sums: torch.Tensor) -> torch.Tensor:
    """Join the `_kl_sums` of several blocks, [n, 5, T], to those of one block of all their words, [5, T]."""
    maxima, exp_sums, exp_ratio_sums, ref_maxima, ref_exp_sums = sums.unbind(1)
    maximum, ref_maximum = maxima.amax(0), ref_maxima.amax(0)
    shift, ref_shift = maxima - maximum, ref_maxima - ref_maximum
    scale = shift.exp()
    exp_ratio_sum = (scale * (exp_ratio_sums + (shift - ref_shift) * exp_sums)).sum(0)
    ref_exp_sum = (ref_shift.exp() * ref_exp_sums).sum(0)
    return torch.stack([maximum, (scale * exp_sums).sum(0), exp_ratio_sum, ref_maximum, ref_exp_sum])


def _add_product(total: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    """Add a product to the total, summed in its numbers; a CPU rounds each product to those of its factors first."""
    if total.dtype == one.dtype:
        total.addmm_(one, other)
    elif total.is_cuda:
        torch.addmm(total, one, other, total.dtype, out=total)
    else:
        total.add_(one @ other)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of sums over its numbers: float32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _check(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden [T, H] and weight [V/tp, H], got {[*hidden.shape]} and {[*weight.shape]}")
