"""Vocabulary-parallel log-probs, entropy and KL against torch.log_softmax of whole logits without padding."""

import pytest
import torch
import torch.distributed as dist
from spawn import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.models.vocab_parallel import ALIGNED_WORDS, LogitFactors, vocab_parallel_outputs

TOKENS, HIDDEN, PADDED = 23, 9, 24
AT_A_TIME = (1, 5 * TOKENS, 7 * TOKENS, 10**6)
"""Words, one at a time, 5, 7 and all of them."""


def dense(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, temperature: float) -> tuple:
    log_p = torch.log_softmax(logits[:, :vocab_size] / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def make_case(vocab_size: int, dtype: torch.dtype, offset: float = 0.0) -> tuple:
    """Hidden states, a weight whose logits all have the offset, targets, and the weights of a loss."""
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    hidden[:, 0], weight[:, 0] = 1.0, offset
    weight[vocab_size:, 0] += 50.0  # padding that would win if it counted
    targets = torch.randint(vocab_size, (TOKENS,), generator=generator)
    targets[:2] = torch.tensor([0, vocab_size - 1])
    return hidden.to(dtype), weight.to(dtype), targets, torch.randn(2, TOKENS, generator=generator)


def mine() -> slice:
    """The words of this rank."""
    width = PADDED // dist.get_world_size()
    return slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)


def leaves(*tensors: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(dtype or tensor.dtype).clone().requires_grad_() for tensor in tensors)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    return logits if cap is None else cap * torch.tanh(logits / cap)


def check(
    case: tuple, vocab_size: int, temperature: float, at_a_time: int, tol: float, cap: float | None = None
) -> None:
    hidden, weight, targets, weights = case
    whole = leaves(hidden, weight, dtype=torch.float64)
    expected = dense(capped(whole[0] @ whole[1].T, cap), targets, vocab_size, temperature)
    (weights[0] * expected[0] + weights[1] * expected[1]).sum().backward()
    shard = leaves(hidden, weight[mine()])
    settings = {"vocab_size": vocab_size, "temperature": temperature, "at_a_time": at_a_time, "logit_cap": cap}
    outputs = vocab_parallel_outputs(*shard, targets, dist.group.WORLD, **settings)
    log_probs, entropy = outputs["log_probs"], outputs["entropy"]
    (weights[0] * log_probs + weights[1] * entropy).sum().backward()
    assert log_probs.dtype == entropy.dtype == torch.promote_types(hidden.dtype, torch.float32)
    close = {"rtol": tol, "atol": tol}
    torch.testing.assert_close(log_probs.double(), expected[0], **close)
    torch.testing.assert_close(entropy.double(), expected[1], **close)
    # The first column's gradient is the offset times a sum that is 0 up to rounding.
    torch.testing.assert_close(shard[0].grad[:, 1:].double(), whole[0].grad[:, 1:], **close)
    torch.testing.assert_close(shard[1].grad.double(), whole[1].grad[mine()], **close)
    assert torch.equal(shard[0].detach(), hidden) and torch.equal(shard[1].detach(), weight[mine()])


def check_all(rank: int, world_size: int) -> None:
    for vocab_size in (24, 21, 13):  # at TP 4, 13 leaves the last shard nothing but padding
        for at_a_time in AT_A_TIME:
            check(make_case(vocab_size, torch.float64), vocab_size, 0.7, at_a_time, 1e-12)
            check(make_case(vocab_size, torch.float32), vocab_size, 0.7, at_a_time, 1e-5)
            check(make_case(vocab_size, torch.float32), vocab_size, 0.7, at_a_time, 1e-5, cap=2.0)
    check(make_case(21, torch.float32, offset=-1000.0), 21, 1.0, AT_A_TIME[1], 1e-3)
    check(make_case(21, torch.bfloat16), 21, 1.0, AT_A_TIME[1], 0.1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_the_dense_result(world_size: int) -> None:
    run_ranks(world_size, check_all)


def dense_kl(logits: torch.Tensor, ref_logits: torch.Tensor, vocab_size: int, temperature: float) -> torch.Tensor:
    log_p, log_q = (torch.log_softmax(x[:, :vocab_size] / temperature, dim=-1) for x in (logits, ref_logits))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def check_kl(
    vocab_size: int,
    dtype: torch.dtype,
    at_a_time: int,
    offset: float,
    tol: float,
    cap: float | None = None,
    ref_cap: float | None = None,
) -> None:
    """At another temperature and with the reference at another offset, which a softmax does not see."""
    hidden, weight, targets, weights = make_case(vocab_size, dtype)
    ref_hidden, ref_weight, *_ = make_case(vocab_size, dtype, offset)
    ref_hidden = ref_hidden.roll(3, dims=0)
    whole = leaves(hidden, weight, dtype=torch.float64)
    logits = capped(whole[0] @ whole[1].T, cap)
    ref_logits = capped(ref_hidden.double() @ ref_weight.double().T, ref_cap)
    expected = dense_kl(logits, ref_logits, vocab_size, 0.7)
    (weights[0] * expected + weights[1] * dense(logits, targets, vocab_size, 0.7)[0]).sum().backward()
    shard, ref_shard = leaves(hidden, weight[mine()]), leaves(ref_hidden, ref_weight[mine()])
    settings = {"vocab_size": vocab_size, "temperature": 0.7, "at_a_time": at_a_time, "logit_cap": cap}
    reference = LogitFactors(*ref_shard, ref_cap)
    outputs = vocab_parallel_outputs(*shard, targets, dist.group.WORLD, reference=reference, **settings)
    kl = outputs["full_kl"]
    (weights[0] * kl + weights[1] * outputs["log_probs"]).sum().backward()
    assert kl.dtype == torch.promote_types(dtype, torch.float32)
    assert expected.min() > 0.1, "the distributions must differ for this test to see it"
    torch.testing.assert_close(kl.double(), expected.detach(), rtol=tol, atol=tol)
    torch.testing.assert_close(shard[0].grad[:, 1:].double(), whole[0].grad[:, 1:], rtol=tol, atol=tol)
    torch.testing.assert_close(shard[1].grad.double(), whole[1].grad[mine()], rtol=tol, atol=tol)
    assert ref_shard[0].grad is None and ref_shard[1].grad is None
    same = LogitFactors(*shard, cap)
    itself = vocab_parallel_outputs(*shard, targets, dist.group.WORLD, reference=same, **settings)["full_kl"]
    gradients = torch.autograd.grad(itself.sum(), shard)
    assert max(float(one.abs().max()) for one in (itself, *gradients)) < 1e-5, "of a policy to itself"


def check_all_kls(rank: int, world_size: int) -> None:
    for vocab_size in (24, 21, 13):
        for at_a_time in AT_A_TIME:
            check_kl(vocab_size, torch.float64, at_a_time, 0.0, 1e-12)
            check_kl(vocab_size, torch.float64, at_a_time, 0.0, 1e-12, 2.0, 1.0)
            check_kl(vocab_size, torch.float32, at_a_time, 0.0, 1e-4)
    check_kl(21, torch.float32, AT_A_TIME[1], -1000.0, 1e-3)
    check_kl(21, torch.bfloat16, AT_A_TIME[1], 0.0, 0.2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_kl_equals_the_dense_result(world_size: int) -> None:
    run_ranks(world_size, check_all_kls)


def gradients_of_one_output(rank: int, world_size: int) -> None:
    hidden, weight, targets, weights = make_case(21, torch.float64)
    for number, output in enumerate(("log_probs", "entropy")):
        whole = leaves(hidden, weight)
        (weights[0] * dense(whole[0] @ whole[1].T, targets, 21, 1.0)[number]).sum().backward()
        shard = leaves(hidden, weight[mine()])
        outputs = vocab_parallel_outputs(*shard, targets, dist.group.WORLD, vocab_size=21)
        (weights[0] * outputs[output]).sum().backward()
        torch.testing.assert_close(shard[0].grad, whole[0].grad, rtol=0, atol=1e-12)
        torch.testing.assert_close(shard[1].grad, whole[1].grad[mine()], rtol=0, atol=1e-12)


def test_either_output_has_its_own_gradient() -> None:
    run_ranks(2, gradients_of_one_output)


def gradients_in_place(rank: int, world_size: int) -> None:
    """They are added to what another layer has put there, as with tied embeddings; a frozen weight has none."""
    for dtype, tol in ((torch.float32, 1e-6), (torch.bfloat16, 0.0)):
        hidden, weight, targets, _ = make_case(21, dtype)
        outside, inside = leaves(weight, weight)
        inside.main_grad = torch.ones(weight.shape)
        for own in (outside, inside):
            outputs = vocab_parallel_outputs(hidden, own, targets, dist.group.WORLD, vocab_size=21)
            outputs["log_probs"].sum().backward()
        assert inside.grad is None
        torch.testing.assert_close(inside.main_grad - 1, outside.grad.float(), rtol=0, atol=1e-6 + 0.01 * (tol == 0))
        (state,) = leaves(hidden)
        frozen = vocab_parallel_outputs(state, weight, targets, dist.group.WORLD, vocab_size=21)
        frozen["log_probs"].sum().backward()
        assert state.grad is not None and weight.grad is None


def test_a_weights_gradient_is_added_to_its_main_grad() -> None:
    run_ranks(1, gradients_in_place)


def refusals(rank: int, world_size: int) -> None:
    hidden, weight, targets, _ = make_case(21, torch.float32)
    group = dist.group.WORLD
    targets[3], targets[4] = 21, -100
    outputs = vocab_parallel_outputs(hidden, weight, targets, group, vocab_size=21)
    assert outputs["log_probs"].isnan().nonzero().flatten().tolist() == [3, 4]
    assert outputs["entropy"].isfinite().all()
    with pytest.raises(ValueError, match="25 of vocab_size"):
        vocab_parallel_outputs(hidden, weight, targets, group, vocab_size=25)
    with pytest.raises(ValueError, match="the reference must have the policy's vocabulary"):
        shorter = LogitFactors(hidden, weight[1:])
        vocab_parallel_outputs(hidden, weight, targets, group, vocab_size=21, reference=shorter)
    reference = LogitFactors(hidden[:0], weight)
    nothing = vocab_parallel_outputs(hidden[:0], weight, targets[:0], group, vocab_size=21, reference=reference)
    assert [tuple(output.shape) for output in nothing.values()] == [(0,), (0,), (0,)]


def test_targets_outside_the_vocabulary_are_nan_and_vocabularies_that_do_not_fit_are_refused() -> None:
    run_ranks(1, refusals)


class MatrixWidths(TorchDispatchMode):
    """Notes the number of columns of each matrix product."""

    def __init__(self):
        super().__init__()
        self.widths: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default:
            self.widths.append(result.shape[1])
        return result


def check_aligned(rank: int, world_size: int) -> None:
    words, tokens = 1000, 7
    hidden, weight = torch.randn(tokens, HIDDEN), torch.randn(words, HIDDEN)
    targets = torch.randint(words, (tokens,))
    with MatrixWidths() as products:
        vocab_parallel_outputs(hidden, weight, targets, dist.group.WORLD, vocab_size=words, at_a_time=tokens * 300)
    assert products.widths == [256, 256, 256, 232]
    assert not any(width % ALIGNED_WORDS for width in products.widths[:-1])


def test_blocks_of_words_fit_the_kernels_of_gpus() -> None:
    run_ranks(1, check_aligned)
