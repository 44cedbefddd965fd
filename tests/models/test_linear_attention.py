"""Linear attention in packs, against transformers' rule of one token at a time and torch's convolution, row by row."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from megappo.architecture.architecture import DELTA_CHUNK
from megappo.models.linear_attention import causal_convolution, delta_rule
from megappo.models.packed_attention import Pack

LENGTHS = [1, DELTA_CHUNK + 6, 3, DELTA_CHUNK, 2 * DELTA_CHUNK + 1, 2, 40]
"""Several rows in a chunk, and rows of several chunks."""
KEY_HEADS, HEADS, KEY, VALUE, KERNEL = 2, 4, 8, 12, 4


def pack() -> Pack:
    bounds = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).int()
    return Pack(bounds, LENGTHS, torch.cat([torch.arange(length) for length in LENGTHS]))


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = (KEY_HEADS, KEY), (KEY_HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,)
    query, key, value, decay, beta = (torch.randn(sum(LENGTHS), *shape, generator=generator) for shape in shapes)
    return [one.requires_grad_() for one in (query, key, value, -F.softplus(decay), beta.sigmoid())]


def by_token(*tensors: Tensor) -> Tensor:
    outputs = []
    for row in zip(*(tensor.split(LENGTHS) for tensor in tensors), strict=True):
        query, key, value, decay, beta = (tensor[None] for tensor in row)
        query, key = (one.repeat_interleave(HEADS // KEY_HEADS, dim=2) for one in (query, key))
        output, _ = torch_recurrent_gated_delta_rule(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)
        outputs.append(output[0])
    return torch.cat(outputs)


def test_each_row_of_a_pack_has_a_state_of_its_own() -> None:
    tensors = inputs()
    found, expected = delta_rule(*tensors, pack()), by_token(*tensors)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    gradients = (torch.autograd.grad((output * weights).sum(), tensors) for output in (found, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_convolution_reads_no_other_row() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(sum(LENGTHS), 5, generator=generator), torch.randn(5, KERNEL, generator=generator)
    expected = [
        F.silu(F.conv1d(row.T[None], weight[:, None], padding=KERNEL - 1, groups=5)[0, :, : len(row)].T)
        for row in x.split(LENGTHS)
    ]
    torch.testing.assert_close(causal_convolution(x, weight, pack().positions), torch.cat(expected))
