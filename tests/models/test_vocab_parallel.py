"""Vocabulary-parallel log-probs, entropy and KL against torch.log_softmax of the gathered, unpadded logits."""

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks

from megappo.models.vocab_parallel import vocab_parallel_kl, vocab_parallel_log_probs_and_entropy

TOKENS, PADDED = 23, 24


def dense(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, temperature: float) -> tuple:
    log_p = torch.log_softmax(logits[:, :vocab_size] / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def make_case(vocab_size: int, dtype: torch.dtype, offset: float = 0.0) -> tuple:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(TOKENS, PADDED, generator=generator) * 3 + offset
    logits[:, vocab_size:] = 7.0  # padding that would win if it counted
    targets = torch.randint(vocab_size, (TOKENS,), generator=generator)
    targets[:2] = torch.tensor([0, vocab_size - 1])
    weights = torch.randn(2, TOKENS, generator=generator)
    return logits.to(dtype), targets, weights


def check(rank: int, world_size: int, case: tuple, vocab_size: int, temperature: float, chunk: int, tol: float) -> None:
    logits, targets, weights = case
    whole = logits.float().clone().requires_grad_()
    expected = dense(whole, targets, vocab_size, temperature)
    (weights[0] * expected[0] + weights[1] * expected[1]).sum().backward()
    width = PADDED // world_size
    mine = slice(rank * width, (rank + 1) * width)
    shard = logits[:, mine].clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(
        shard, targets, dist.group.WORLD, vocab_size=vocab_size, temperature=temperature, chunk=chunk
    )
    (weights[0] * log_probs + weights[1] * entropy).sum().backward()
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected[0], rtol=0, atol=1e-5 * tol)
    torch.testing.assert_close(entropy, expected[1], rtol=0, atol=1e-5 * tol)
    torch.testing.assert_close(shard.grad.float(), whole.grad[:, mine], rtol=0, atol=1e-5 * tol)
    assert torch.equal(shard.detach(), logits[:, mine])


def check_all(rank: int, world_size: int) -> None:
    for vocab_size in (24, 21, 13):  # at TP 4, 13 leaves the last shard nothing but padding
        for chunk in (1, 7, 1024):
            check(rank, world_size, make_case(vocab_size, torch.float32), vocab_size, 0.7, chunk, 1)
    check(rank, world_size, make_case(21, torch.float32, offset=-1000.0), 21, 1.0, 7, 20)
    check(rank, world_size, make_case(21, torch.bfloat16), 21, 1.0, 7, 2000)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_the_dense_result(world_size: int) -> None:
    run_ranks(world_size, check_all)


def dense_kl(logits: torch.Tensor, ref_logits: torch.Tensor, vocab_size: int, temperature: float) -> torch.Tensor:
    log_p, log_q = (torch.log_softmax(x[:, :vocab_size].double() / temperature, dim=-1) for x in (logits, ref_logits))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def check_kl(
    rank: int, world_size: int, vocab_size: int, dtype: torch.dtype, chunk: int, offset: float, tol: float
) -> None:
    """At another temperature and with the reference at another offset, which a softmax does not see."""
    logits, _, weights = make_case(vocab_size, dtype)
    ref_logits = make_case(vocab_size, dtype, offset)[0].roll(3, dims=0)
    whole = logits.double().clone().requires_grad_()
    expected = dense_kl(whole, ref_logits, vocab_size, 0.7)
    (weights[0] * expected).sum().backward()
    width = PADDED // world_size
    mine = slice(rank * width, (rank + 1) * width)
    shard, ref_shard = logits[:, mine].clone().requires_grad_(), ref_logits[:, mine].clone().requires_grad_()
    kl = vocab_parallel_kl(shard, ref_shard, dist.group.WORLD, vocab_size=vocab_size, temperature=0.7, chunk=chunk)
    (weights[0] * kl).sum().backward()
    assert kl.dtype == torch.promote_types(dtype, torch.float32)
    assert expected.min() > 0.1, "the distributions must differ for this test to see it"
    torch.testing.assert_close(kl.double(), expected.detach(), rtol=tol, atol=tol)
    torch.testing.assert_close(shard.grad.double(), whole.grad[:, mine], rtol=tol, atol=tol)
    assert ref_shard.grad is None
    assert torch.equal(shard, logits[:, mine]) and torch.equal(ref_shard, ref_logits[:, mine])
    itself = vocab_parallel_kl(shard, shard.detach(), dist.group.WORLD, vocab_size=vocab_size, temperature=0.7)
    (gradient,) = torch.autograd.grad(itself.sum(), shard)
    assert itself.abs().max() < 2e-6 and gradient.abs().max() < 2e-6, "of a policy to itself"


def check_all_kls(rank: int, world_size: int) -> None:
    for vocab_size in (24, 21, 13):
        for chunk in (1, 7, 1024):
            check_kl(rank, world_size, vocab_size, torch.float64, chunk, 0.0, 1e-12)
            check_kl(rank, world_size, vocab_size, torch.float32, chunk, 0.0, 1e-5)
    check_kl(rank, world_size, 21, torch.float32, 7, -1000.0, 1e-3)
    check_kl(rank, world_size, 21, torch.bfloat16, 7, 0.0, 2e-2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_kl_equals_the_dense_result(world_size: int) -> None:
    run_ranks(world_size, check_all_kls)


def gradients_of_one_output(rank: int, world_size: int) -> None:
    logits, targets, weights = make_case(21, torch.float64)
    width = PADDED // world_size
    for output in (0, 1):
        whole = logits.clone().requires_grad_()
        (weights[0] * dense(whole, targets, 21, 1.0)[output]).sum().backward()
        shard = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
        outputs = vocab_parallel_log_probs_and_entropy(shard, targets, dist.group.WORLD, vocab_size=21)
        (weights[0] * outputs[output]).sum().backward()
        expected = whole.grad[:, rank * width : (rank + 1) * width]
        torch.testing.assert_close(shard.grad, expected, rtol=0, atol=1e-12)


def test_either_output_has_its_own_gradient() -> None:
    run_ranks(2, gradients_of_one_output)


def refusals(rank: int, world_size: int) -> None:
    logits, targets, _ = make_case(21, torch.float32)
    group = dist.group.WORLD
    targets[3], targets[4] = 21, -100
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, targets, group, vocab_size=21)
    assert log_probs.isnan().nonzero().flatten().tolist() == [3, 4]
    assert entropy.isfinite().all()
    with pytest.raises(ValueError, match="25 of vocab_size"):
        vocab_parallel_log_probs_and_entropy(logits, targets, group, vocab_size=25)
    with pytest.raises(ValueError, match=r"targets \[T\]"):
        vocab_parallel_log_probs_and_entropy(logits, targets[1:], group, vocab_size=21)
    for other in (logits[1:], logits[:, 1:]):
        with pytest.raises(ValueError, match="the reference must have the policy's vocabulary"):
            vocab_parallel_kl(logits, other, group, vocab_size=21)
    with pytest.raises(ValueError, match="25 of vocab_size"):
        vocab_parallel_kl(logits, logits, group, vocab_size=25)
    assert vocab_parallel_kl(logits[:0], logits[:0], group, vocab_size=21).shape == (0,)
    nothing = vocab_parallel_log_probs_and_entropy(logits[:0], targets[:0], group, vocab_size=21)
    assert [tuple(output.shape) for output in nothing] == [(0,), (0,)]


def test_targets_outside_the_vocabulary_are_nan_and_bad_shapes_are_refused() -> None:
    run_ranks(1, refusals)
