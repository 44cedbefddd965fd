"""Triton kernels of the policy's head. Each reads a block of logits once; torch passes over it about ten times.

`vocab_parallel` has the same functions in torch, which are these kernels' oracle. With TRITON_INTERPRET=1 Triton runs
them on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""Logits of one token that a program reads at a time."""


def has_kernels(tensor: Tensor) -> bool:
    """Return whether the kernels compute from such hidden states: on a GPU, or in Triton's interpreter."""
    is_known = tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return is_known and (tensor.is_cuda or triton.knobs.runtime.interpret)


def add_sums(sums: Tensor, logits: Tensor, columns: Tensor, temperature: float) -> Tensor:
    """Add a block of words to the sums over the blocks before it, in place. See `vocab_parallel.add_sums`.

    Args:
        sums: [4, T] float32, contiguous.
        logits: [T, block], rows of adjacent numbers.
        columns: [T] int64, the target's column in the block; outside [0, block) if it is in another block.
    """
    num_tokens, num_words = logits.shape
    if num_tokens:
        _add_sums[(num_tokens,)](
            sums, logits, columns, temperature, num_tokens, num_words, logits.stride(0), COLUMNS=COLUMNS
        )
    return sums


def gradient(logits: Tensor, columns: Tensor, per_token: Tensor, temperature: float) -> Tensor:
    """Overwrite a block of logits with their gradient, in the logits' dtype. See `vocab_parallel.gradient`.

    Args:
        logits, columns: as in `add_sums`.
        per_token: [4, T] float32, contiguous.
    """
    num_tokens, num_words = logits.shape
    if num_tokens:
        _gradient[(num_tokens,)](
            logits, columns, per_token, temperature, num_tokens, num_words, logits.stride(0), COLUMNS=COLUMNS
        )
    return logits


@triton.jit
def _add_sums(
    sums,
    logits,
    columns,
    temperature,
    num_tokens,
    num_words,
    stride,
    COLUMNS: tl.constexpr,
):
    """One program a token. sums: maximum, sum exp(s), sum exp(s) s with s = x - maximum, and the target's logit."""
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride
    maximum = tl.load(sums + token)
    exp_sum = tl.load(sums + num_tokens + token)
    exp_shifted_sum = tl.load(sums + 2 * num_tokens + token)
    for start in range(0, num_words, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(row + column, mask=column < num_words, other=-1e30).to(tl.float32) / temperature
        new_maximum = tl.maximum(maximum, tl.max(x, 0))
        shift = maximum - new_maximum
        s = x - new_maximum
        exp = tl.exp(s)  # exactly 0 where there is no word
        exp_shifted_sum = tl.exp(shift) * (exp_shifted_sum + shift * exp_sum) + tl.sum(exp * s, 0)
        exp_sum = tl.exp(shift) * exp_sum + tl.sum(exp, 0)
        maximum = new_maximum
    tl.store(sums + token, maximum)
    tl.store(sums + num_tokens + token, exp_sum)
    tl.store(sums + 2 * num_tokens + token, exp_shifted_sum)
    target = tl.load(columns + token)
    if (target >= 0) & (target < num_words):
        x = tl.load(row + target).to(tl.float32) / temperature
        tl.store(sums + 3 * num_tokens + token, x)


@triton.jit
def _gradient(
    logits,
    columns,
    per_token,
    temperature,
    num_tokens,
    num_words,
    stride,
    COLUMNS: tl.constexpr,
):
    """One program a token. per_token: log-normaliser, entropy, and the gradients of the log-prob and the entropy."""
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride
    normaliser = tl.load(per_token + token)
    mean = tl.load(per_token + num_tokens + token)
    of_target = tl.load(per_token + 2 * num_tokens + token) / temperature
    of_entropy = tl.load(per_token + 3 * num_tokens + token) / temperature
    target = tl.load(columns + token)
    for start in range(0, num_words, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_word = column < num_words
        log_p = tl.load(row + column, mask=is_word, other=-1e30).to(tl.float32) / temperature - normaliser
        grad = -tl.exp(log_p) * (of_target + of_entropy * (log_p + mean))
        grad += tl.where(column == target, of_target, 0.0)
        tl.store(row + column, grad.to(row.dtype.element_ty), mask=is_word)
