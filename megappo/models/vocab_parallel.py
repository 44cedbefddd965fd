"""Log-probs, entropy and KL of distributions over a sharded vocabulary, from hidden states, without ever holding the
logits of more than a block of words, in either direction."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.architecture.parameters import LOGITS_AT_A_TIME
from megappo.models import head_kernels

ALIGNED_WORDS = 128
"""Blocks are multiples of this where they are larger: with rows of an odd number of words cuBLAS has no kernel of
Hopper's, and on an H100 the head took half of an update of 0.6 billion parameters."""
NO_LOGIT = -1e30
"""The maximum of no logits: exp() of it is exactly 0, and unlike -inf it leaves no NaN in 0 x inf."""


class LogitFactors(NamedTuple):
    """Factors of logits.

    Attributes:
        hidden: hidden states [T, H].
        weight: this rank's shard of the output weight, [V/tp, H].
        cap: see `Architecture.logit_cap`.
    """

    hidden: Tensor
    weight: Tensor
    cap: float | None = None

    def logits(self, words: slice) -> Tensor:
        """Return the logits of a block of words, [T, block]: hidden @ weight.T, capped in fp32 if they have a cap."""
        logits = torch.mm(self.hidden, self.weight[words].T)
        return logits if self.cap is None else logits.to(_wide(logits)).div_(self.cap).tanh_().mul_(self.cap)


def vocab_parallel_outputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    logit_cap: float | None = None,
    reference: LogitFactors | None = None,
    at_a_time: int | None = None,
) -> dict[str, Tensor]:
    """Return the log-prob of each target, and entropy and KL of each token's distribution, softmax(hidden @ weight.T /
    temperature).

    The backward pass computes the logits once more, a block of words at a time, and adds the weight's gradient to its
    `main_grad`, where Megatron has made one that is not reduced before all passes are done. Collectives: one gathering
    of [4, T] in the forward pass (and one more, and a sum, for a reference), one sum of the hidden states' gradient in
    the backward pass.

    Args:
        hidden: [T, H], the same on every rank of the group, as its gradient will be.
        weight: [V/tp, H], of hidden's dtype: this rank's contiguous shard of the padded vocabulary, rank order.
        targets: [T] int64 token ids, the same on every rank of the group.
        group: ranks that hold the shards; every one of them calls.
        vocab_size: true vocabulary; words from there on are padding: no probability, gradient 0.
        temperature: divides the logits.
        logit_cap: see `Architecture`; the cap comes before the temperature.
        reference: adds `full_kl`. Another model's [T, H'] and [V/tp, H'], sharded in the same way; no gradient.
        at_a_time: logits worked on at a time, LOGITS_AT_A_TIME by default. It changes the rounding of the result only.
    Returns:
        `log_probs`, `entropy` and `full_kl`, KL(policy || reference) over the vocabulary: [T] float32 (float64 for
        float64), in nats, the same on every rank. A target outside [0, vocab_size) has log-prob NaN.
    Raises:
        ValueError: all shards together are smaller than the vocabulary, or the reference's are of another size.
    Source: d log p(y) / dx = onehot(y) - p, d H / dx = -p (log p + H) and d KL / dx = p (log p - log q - KL). The
        block-wise softmax: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    num_words = len(weight)
    _check(num_words, group, vocab_size, reference)
    first = group.rank() * num_words
    end = min(max(vocab_size - first, 0), num_words)
    blocks = _blocks(end, len(hidden), at_a_time or LOGITS_AT_A_TIME[hidden.device.type])
    vocabulary = _Vocabulary(group, temperature, blocks)
    log_probs, entropy, full_kl = _Outputs.apply(hidden, weight, logit_cap, targets - first, reference, vocabulary)
    is_word = (targets >= 0) & (targets < vocab_size)
    outputs = {"log_probs": torch.where(is_word, log_probs, torch.nan), "entropy": entropy}
    return outputs if full_kl is None else outputs | {"full_kl": full_kl}


def _check(
    num_words: int,
    group: dist.ProcessGroup,
    vocab_size: int,
    reference: LogitFactors | None,
) -> None:
    if num_words * group.size() < vocab_size:
        raise ValueError(
            f"{group.size()} shards of {num_words} words hold fewer than the {vocab_size} of vocab_size; "
            "pass the model's true vocabulary size"
        )
    if reference is not None and len(reference[1]) != num_words:
        raise ValueError(
            f"expected as many words of both models, got {num_words} and {len(reference[1])}; the reference must have "
            "the policy's vocabulary and layout"
        )


def _blocks(num_words: int, num_tokens: int, at_a_time: int) -> list[slice]:
    """Cut words into blocks for which all tokens have about `at_a_time` logits."""
    block = max(at_a_time // max(num_tokens, 1), 1)
    if block > ALIGNED_WORDS:
        block -= block % ALIGNED_WORDS
    return [slice(start, min(start + block, num_words)) for start in range(0, num_words, block)]


class _Vocabulary(NamedTuple):
    """The shards of a vocabulary, and the blocks of this rank's words, without padding."""

    group: dist.ProcessGroup
    temperature: float
    blocks: list[slice]

    def log_softmax(
        self,
        factors: LogitFactors,
        log_normaliser: Tensor,
        words: slice,
    ) -> Tensor:
        """Return the log-probs of a block of words, [T, block]."""
        return _divided(factors.logits(words), self.temperature).sub_(log_normaliser[:, None])


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        cap: float | None,
        columns: Tensor,
        reference: LogitFactors | None,
        vocabulary: _Vocabulary,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute outputs. columns: [T], each target's column in this rank's shard; outside it if it is in another."""
        factors = LogitFactors(hidden, weight, cap)
        log_probs, entropy, log_normaliser = _statistics(factors, columns, vocabulary)
        saved = [hidden, weight, columns, log_normaliser, entropy]
        kl = None
        if reference is not None:
            *_, ref_log_normaliser = _statistics(reference, columns, vocabulary)
            kl = torch.zeros_like(entropy)
            for words in vocabulary.blocks:
                log_p = vocabulary.log_softmax(factors, log_normaliser, words)
                log_q = vocabulary.log_softmax(reference, ref_log_normaliser, words)
                kl += (log_p.exp() * (log_p - log_q)).sum(1)
            dist.all_reduce(kl, group=vocabulary.group)
            saved += [reference.hidden, reference.weight, ref_log_normaliser, kl]
            ctx.ref_cap = reference.cap
        ctx.save_for_backward(*saved)
        ctx.vocabulary = vocabulary
        ctx.cap = cap
        return log_probs, entropy, kl

    @staticmethod
    def backward(
        ctx: Any,
        grad_log_probs: Tensor,
        grad_entropy: Tensor,
        grad_kl: Tensor | None,
    ) -> tuple:
        hidden, weight, columns, log_normaliser, entropy, *for_kl = ctx.saved_tensors
        vocabulary = ctx.vocabulary
        factors = LogitFactors(hidden, weight, ctx.cap)
        grad_block = head_kernels.gradient if head_kernels.has_kernels(hidden) else gradient
        per_token = torch.stack([log_normaliser, entropy, grad_log_probs, grad_entropy])
        grad_hidden = torch.zeros_like(hidden, dtype=_wide(hidden))
        # What is reduced as soon as autograd has it must come from autograd.
        is_added_here = ctx.needs_input_grad[1] and not getattr(weight, "is_reduced_early", False)
        into = getattr(weight, "main_grad", None) if is_added_here else None
        returned = torch.zeros_like(weight) if ctx.needs_input_grad[1] and into is None else None
        into = returned if into is None else into
        for words in vocabulary.blocks:
            logits = factors.logits(words)
            slope = None if ctx.cap is None else 1 - (logits / ctx.cap).square()  # derivative of the cap
            grad = grad_block(logits, columns - words.start, per_token, vocabulary.temperature)
            if grad_kl is not None:
                ref_hidden, ref_weight, ref_log_normaliser, kl = for_kl
                log_p = vocabulary.log_softmax(factors, log_normaliser, words)
                ref_factors = LogitFactors(ref_hidden, ref_weight, ctx.ref_cap)
                log_q = vocabulary.log_softmax(ref_factors, ref_log_normaliser, words)
                p = log_p.exp()
                of_kl = log_p.sub_(log_q).sub_(kl[:, None]).mul_(p).mul_(grad_kl[:, None] / vocabulary.temperature)
                grad = of_kl.add_(grad)
            grad = (grad if slope is None else grad.mul_(slope)).to(hidden.dtype)
            _add_product(grad_hidden, grad, weight[words])
            if into is not None:
                _add_product(into[words], grad.T, hidden)
        if vocabulary.group.size() > 1:
            dist.all_reduce(grad_hidden, group=vocabulary.group)
        return grad_hidden.to(hidden.dtype), returned, None, None, None, None


def _statistics(factors: LogitFactors, columns: Tensor, vocabulary: _Vocabulary) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-prob of the target, entropy, and log sum exp(x) of the logits x over all shards, [T] each."""
    hidden = factors.hidden
    add = head_kernels.add_sums if head_kernels.has_kernels(hidden) else add_sums
    sums = hidden.new_zeros(4, len(hidden), dtype=_wide(hidden))
    sums[0] = NO_LOGIT
    for words in vocabulary.blocks:
        logits = factors.logits(words)
        sums = add(sums, logits, columns - words.start, vocabulary.temperature)
    shards = sums.new_empty(vocabulary.group.size(), *sums.shape)
    dist.all_gather([*shards], sums, group=vocabulary.group)
    maxima, exp_sums, exp_shifted_sums, targets = shards.unbind(1)
    maximum = maxima.amax(0)
    shift = maxima - maximum
    scale = shift.exp()
    exp_sum = (scale * exp_sums).sum(0)
    exp_shifted_sum = (scale * (exp_shifted_sums + shift * exp_sums)).sum(0)
    # With s = x - max and Z = sum exp(s): log p = s - log Z, and H = log Z - sum(exp(s) s) / Z.
    log_exp_sum = exp_sum.log()
    log_probs = targets.sum(0) - maximum - log_exp_sum
    return log_probs, log_exp_sum - exp_shifted_sum / exp_sum, maximum + log_exp_sum


def add_sums(sums: Tensor, logits: Tensor, columns: Tensor, temperature: float) -> Tensor:
    """Return the sums over a block of words and all blocks before it. May overwrite its arguments.

    Args:
        sums: [4, T], of the blocks before: the maximum of x = logits / temperature; of s = x - maximum: sum exp(s) and
            sum exp(s) s; the target's x, or 0.
        logits: [T, block].
        columns: [T] int64, the target's column in the block; outside [0, block) if it is in another block.
    """
    x = _divided(logits, temperature)
    old_maximum, exp_sum, exp_shifted_sum, target = sums
    here = (columns >= 0) & (columns < x.shape[1])
    target = target + x.gather(1, torch.where(here, columns, 0)[:, None])[:, 0] * here
    maximum = torch.maximum(old_maximum, x.amax(1))
    shift = old_maximum - maximum
    s = x.sub_(maximum[:, None])
    exp = s.exp()
    exp_shifted_sum = shift.exp() * (exp_shifted_sum + shift * exp_sum) + s.mul_(exp).sum(1)
    exp_sum = shift.exp() * exp_sum + exp.sum(1)
    return torch.stack([maximum, exp_sum, exp_shifted_sum, target])


def gradient(logits: Tensor, columns: Tensor, per_token: Tensor, temperature: float) -> Tensor:
    """Return the gradient of a block of logits, [T, block]. May overwrite its arguments.

    Args:
        logits, columns: as in `add_sums`.
        per_token: [4, T]: log sum exp(x) over all words; the entropy of the token's distribution; the loss's gradient
            of the target's log-prob; the loss's gradient of the entropy.
    """
    log_normaliser, entropy, grad_log_probs, grad_entropy = per_token
    log_p = _divided(logits, temperature)
    log_p.sub_(log_normaliser[:, None])
    p = log_p.exp()

    # -p (of_entropy (log p + H) + of_target), and of_target more at the target.
    of_target = grad_log_probs / temperature
    of_entropy = grad_entropy / temperature
    grad = log_p.add_(entropy[:, None])
    grad.mul_(of_entropy[:, None])
    grad.add_(of_target[:, None])
    grad.mul_(p).neg_()

    is_here = (columns >= 0) & (columns < grad.shape[1])
    places = torch.where(is_here, columns, 0)
    return grad.scatter_add_(1, places[:, None], (of_target * is_here)[:, None])


def _divided(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in float32 (float64 stays). Overwrites logits that have that dtype already."""
    x = logits.to(_wide(logits))
    return x if temperature == 1 else x.div_(temperature)


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add a product to the total, summed in the total's dtype; a CPU first rounds each product to the factors'
    dtype."""
    if total.dtype == one.dtype:
        total.addmm_(one, other)
    elif total.is_cuda:
        torch.addmm(total, one, other, total.dtype, out=total)
    else:
        total.add_(one @ other)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums over its numbers: float32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)
