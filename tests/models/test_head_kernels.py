"""The Triton kernels of the policy's head, run by Triton's interpreter, against torch: block by block and as a whole.

Triton decides when it is imported whether it interprets, so the ranks are processes of their own.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megappo.models import head_kernels, vocab_parallel

TOKENS, HIDDEN = 7, 16
WORDS = head_kernels.COLUMNS + 100
"""A program reads one whole part of a row, and one that is not."""


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_block(dtype: torch.dtype, tolerance: float, temperature: float) -> None:
    """The logits are a part of wider rows."""
    columns = torch.tensor([0, WORDS - 1, 5, -1, WORDS, head_kernels.COLUMNS, 99])
    sums = torch.stack([draw(TOKENS, seed=1), draw(TOKENS, seed=2).exp(), draw(TOKENS, seed=3), torch.zeros(TOKENS)])
    per_token = torch.stack([torch.full((TOKENS,), 9.0), *(draw(TOKENS, seed=seed) for seed in (4, 5, 6))])
    logits = (3 * draw(TOKENS, 2 * WORDS)).to(dtype)[:, :WORDS]
    wide = logits.float()
    expected = vocab_parallel.add_sums(sums.clone(), wide.clone(), columns, temperature)
    expected_gradient = vocab_parallel.gradient(wide.clone(), columns, per_token, temperature)
    assert expected[3].count_nonzero() == TOKENS - 2, "two targets are in other blocks"
    assert head_kernels.has_kernels(logits)
    found = head_kernels.add_sums(sums, logits, columns, temperature)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found_gradient = head_kernels.gradient(logits, columns, per_token, temperature)
    assert found_gradient.dtype == dtype
    torch.testing.assert_close(found_gradient.float(), expected_gradient, rtol=tolerance, atol=1e-5)


def check_head(group: dist.ProcessGroup, uses: tuple[int, ...], cap: float | None) -> None:
    """Several blocks, of which the last shard's last has nothing but padding; against log_softmax of all logits.

    Args:
        uses: outputs that the loss reads: 0 is log_probs, 1 is entropy.
        cap: cap of logits.
    """
    vocab_size, padded = 1300, 2048
    words = padded // group.size()
    own = slice(group.rank() * words, (group.rank() + 1) * words)
    targets = torch.tensor([0, 1299, 512, 511, 1024, 700, 1])
    coefficients = draw(2, TOKENS, seed=2)
    whole = [draw(TOKENS, HIDDEN).requires_grad_(), draw(padded, HIDDEN, seed=1).requires_grad_()]
    logits = whole[0] @ whole[1][:vocab_size].T
    log_p = torch.log_softmax((logits if cap is None else cap * torch.tanh(logits / cap)) / 0.7, -1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    sum((coefficients[use] * expected[use]).sum() for use in uses).backward()

    shard = [whole[0].detach().clone().requires_grad_(), whole[1].detach()[own].clone().requires_grad_()]
    outputs = vocab_parallel.vocab_parallel_outputs(
        *shard, targets, group, vocab_size=vocab_size, temperature=0.7, logit_cap=cap, at_a_time=TOKENS * 512
    )
    found = outputs["log_probs"], outputs["entropy"]
    sum((coefficients[use] * found[use]).sum() for use in uses).backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shard[0].grad, whole[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shard[1].grad, whole[1].grad[own], rtol=1e-4, atol=1e-5)


def check_all(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    alone = [dist.new_group([one]) for one in range(2)][rank]
    if rank == 0:
        for temperature in (1.0, 0.7):
            check_block(torch.float32, 1e-5, temperature)
            check_block(torch.bfloat16, 1e-2, temperature)
    for group, uses in itertools.product((alone, dist.group.WORLD), ((0,), (1,), (0, 1))):
        check_head(group, uses, cap=2.0 if uses == (0, 1) else None)
    nothing = vocab_parallel.vocab_parallel_outputs(
        torch.zeros(0, HIDDEN), torch.zeros(64, HIDDEN), torch.zeros(0, dtype=torch.int64), alone, vocab_size=64
    )
    assert [tuple(output.shape) for output in nothing.values()] == [(0,), (0,)]
    dist.destroy_process_group()


def test_the_kernels_equal_torch(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment, check=True, timeout=200)


@pytest.mark.parametrize("kernel", [head_kernels._add_sums, head_kernels._gradient], ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernels_compile_for_a_gpu(kernel: triton.JITFunction, dtype: str) -> None:
    """For Hopper, by Triton's own compiler and assembler, which need no GPU."""
    types = {"logits": f"*{dtype}", "columns": "*i64", "temperature": "fp32", "COLUMNS": "constexpr"}
    types |= dict.fromkeys(("num_tokens", "num_words", "stride"), "i32")
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index("COLUMNS"),): head_kernels.COLUMNS}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"]


def test_without_a_gpu_torch_computes() -> None:
    assert not head_kernels.has_kernels(torch.zeros(1))


if __name__ == "__main__":
    torch.multiprocessing.spawn(check_all, (sys.argv[1],), nprocs=2)
