"""Log-probs, entropy and KL from vocabulary-sharded logits, which are never gathered."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

NO_PROBABILITY = -1e30
"""Stands for the logits of padding: exp() of it is exactly 0, and unlike -inf it leaves no NaN in 0 x log 0."""


def vocab_parallel_log_probs_and_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each token's distribution, softmax(logits / temperature).

    Collectives: one maximum and one sum in the forward pass, none in the backward pass. The extra memory is
    [chunk, V/tp] float32, and in the backward pass the gradient, of the logits' own shape and dtype.

    Args:
        logits: [T, V/tp], this rank's contiguous shard of the padded vocabulary, rank order; left untouched. It is
            kept for the backward pass, so nobody else may write to it before.
        targets: [T] int64 token ids, the same on every rank of the group.
        group: ranks that hold the shards; every one of them calls.
        vocab_size: true vocabulary; columns from there on are padding, have no probability and get gradient 0.
        temperature: divides the logits here, chunk by chunk, so that the caller needs no scaled copy.
        chunk: tokens worked on at a time; it does not change the result.
    Returns:
        log_probs [T] and entropy [T], float32 (float64 for float64 logits), in nats, the same on every rank. A target
        outside [0, vocab_size) has log-prob NaN.
    Raises:
        ValueError: the shapes do not fit each other or the vocabulary.
    Source: d log p(y) / dx = onehot(y) - p and d H / dx = -p (log p + H).
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"expected logits [T, V/tp] and targets [T], got {[*logits.shape]} and {[*targets.shape]}")
    return _LogProbsAndEntropy.apply(logits, targets, _Vocabulary.of(logits, group, vocab_size, temperature, chunk))


def vocab_parallel_kl(
    logits: torch.Tensor,
    ref_logits: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> torch.Tensor:
    """KL(policy || reference) of each token's distribution, softmax(logits / temperature), over the whole vocabulary.

    Collectives: one maximum and one sum in the forward pass, none in the backward pass. The extra memory is twice
    [chunk, V/tp] float32, and in the backward pass the gradient, of the logits' own shape and dtype.

    Args:
        logits: [T, V/tp], the policy's, as in `vocab_parallel_log_probs_and_entropy`.
        ref_logits: [T, V/tp], the reference's, sharded in the same way; kept for the backward pass, without a gradient.
        group, vocab_size, temperature, chunk: as in `vocab_parallel_log_probs_and_entropy`; for both distributions.
    Returns:
        kl [T], float32 (float64 for float64 logits), in nats, the same on every rank; not below 0 but for rounding.
    Raises:
        ValueError: the shapes do not fit each other or the vocabulary.
    Source: KL = sum p (log p - log q), with p the policy's and q the reference's; d KL / dx = p (log p - log q - KL).
    """
    if logits.ndim != 2 or ref_logits.shape != logits.shape:
        raise ValueError(
            f"expected logits and ref_logits [T, V/tp], got {[*logits.shape]} and {[*ref_logits.shape]}; "
            "the reference must have the policy's vocabulary and layout"
        )
    return _FullKL.apply(logits, ref_logits, _Vocabulary.of(logits, group, vocab_size, temperature, chunk))


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, vocabulary: "_Vocabulary"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        column, here = vocabulary.columns(logits, targets)
        maximum = vocabulary.maximum(logits)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=vocabulary.group)
        sums = torch.cat(
            [_sums(x - maximum[rows, None], column[rows], here[rows]) for rows, x in vocabulary.chunks(logits)], dim=1
        )
        dist.all_reduce(sums, group=vocabulary.group)
        exp_sum, exp_shifted_sum, target = sums
        log_exp_sum = exp_sum.log()
        # With s = x - max and Z = sum exp(s): log p = s - log Z, and H = log Z - sum(exp(s) s) / Z.
        entropy = log_exp_sum - exp_shifted_sum / exp_sum
        known = (targets >= 0) & (targets < vocabulary.size)
        log_probs = torch.where(known, target - log_exp_sum, torch.nan)
        ctx.save_for_backward(logits, maximum + log_exp_sum, entropy, column, here)
        ctx.vocabulary = vocabulary
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple:
        logits, log_normaliser, entropy, column, here = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        for rows, x in ctx.vocabulary.chunks(logits):
            log_p = x - log_normaliser[rows, None]
            p = log_p.exp()
            part = torch.zeros_like(p)
            if grad_log_probs is not None:
                part.addcmul_(p, grad_log_probs[rows, None], value=-1)
                part.scatter_add_(1, column[rows, None], (grad_log_probs[rows] * here[rows])[:, None])
            if grad_entropy is not None:
                part.addcmul_(p * (log_p + entropy[rows, None]), grad_entropy[rows, None], value=-1)
            grad[rows] = part / ctx.vocabulary.temperature
        return grad, None, None


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, ref_logits: torch.Tensor, vocabulary: "_Vocabulary") -> torch.Tensor:
        maxima = torch.stack([vocabulary.maximum(logits), vocabulary.maximum(ref_logits)])
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=vocabulary.group)
        sums = torch.cat(
            [
                _kl_sums(x - maxima[0, rows, None], y - maxima[1, rows, None])
                for (rows, x), (_, y) in zip(vocabulary.chunks(logits), vocabulary.chunks(ref_logits), strict=True)
            ],
            dim=1,
        )
        dist.all_reduce(sums, group=vocabulary.group)
        log_exp_sums = sums[:2].log()
        # With s = x - max and Z = sum exp(s), and u and Z' of the reference: KL = E_p[s - u] - log Z + log Z'.
        kl = sums[2] / sums[0] - log_exp_sums[0] + log_exp_sums[1]
        ctx.save_for_backward(logits, ref_logits, maxima + log_exp_sums, kl)
        ctx.vocabulary = vocabulary
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: torch.Tensor) -> tuple:
        logits, ref_logits, log_normalisers, kl = ctx.saved_tensors
        vocabulary, grad = ctx.vocabulary, torch.zeros_like(logits)
        for (rows, x), (_, y) in zip(vocabulary.chunks(logits), vocabulary.chunks(ref_logits), strict=True):
            log_p = x - log_normalisers[0, rows, None]
            log_ratio = log_p - (y - log_normalisers[1, rows, None])
            part = log_p.exp() * (log_ratio - kl[rows, None]) * grad_kl[rows, None]
            grad[rows] = part / vocabulary.temperature
        return grad, None, None


@dataclass(frozen=True)
class _Vocabulary:
    """Reads a rank's columns [first, first + V/tp) of logits over a padded vocabulary, a chunk of tokens at a time."""

    group: dist.ProcessGroup
    first: int
    size: int
    temperature: float
    chunk: int

    @classmethod
    def of(
        cls, logits: torch.Tensor, group: dist.ProcessGroup, size: int, temperature: float, chunk: int
    ) -> "_Vocabulary":
        """That of logits [T, V/tp]; ValueError where all shards together are smaller."""
        if logits.shape[1] * group.size() < size:
            raise ValueError(
                f"{group.size()} shards of {logits.shape[1]} logits hold fewer than the {size} of vocab_size; "
                "pass the model's true vocabulary size"
            )
        return cls(group, group.rank() * logits.shape[1], size, temperature, chunk)

    def chunks(self, logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows and a scaled copy of their logits, [chunk, V/tp] float32 (float64 stays)."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        for start in range(0, max(len(logits), 1), self.chunk):
            rows = slice(start, start + self.chunk)
            x = logits[rows].to(dtype) / self.temperature
            x[:, max(self.size - self.first, 0) :] = NO_PROBABILITY
            yield rows, x

    def maximum(self, logits: torch.Tensor) -> torch.Tensor:
        """The largest scaled logit here of each token, [T]."""
        return torch.cat([x.amax(-1) for _, x in self.chunks(logits)])

    def columns(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The targets' columns in this shard, [T] int64 (0 where elsewhere), and whether they are in it, [T] bool."""
        column = targets - self.first
        here = (column >= 0) & (column < logits.shape[1])
        return torch.where(here, column, 0), here


def _sums(shifted: torch.Tensor, column: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
    """This shard's part of sum exp(s), sum exp(s) s and the target's s, [3, chunk], from s [chunk, V/tp]."""
    exp = shifted.exp()
    target = shifted.gather(1, column[:, None])[:, 0] * here
    return torch.stack([exp.sum(-1), (exp * shifted).sum(-1), target])


def _kl_sums(shifted: torch.Tensor, ref_shifted: torch.Tensor) -> torch.Tensor:
    """This shard's part of sum exp(s), sum exp(u) and sum exp(s) (s - u), [3, chunk], from s and u [chunk, V/tp]."""
    exp = shifted.exp()
    return torch.stack([exp.sum(-1), ref_shifted.exp().sum(-1), (exp * (shifted - ref_shifted)).sum(-1)])
