"""Attention of packs, as the torch layers do it, against a dense one: a call for each sequence, then varlen_attn.

python tests/gpu/stages/attention.py
"""

from functools import partial

import torch
from common import CUDA, DEVICE, measured, one_rank, report, sized
from lone_attention import lone_attention

from megappo.models.packed_attention import Pack, PackedAttention
from megappo.runtime import platform

HEADS, KV_HEADS, SIZE = sized((16, 8, 128), (4, 2, 8))
TOKENS = sized(16_384, 24)
CHECKED = sized(2048, 24)  # a dense mask is of their square
SEQUENCES = sized((1, 8, 64), (1, 4))
DTYPE = torch.bfloat16


def qkv(num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(num_tokens, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    made = [torch.randn(shape, generator=generator, device=DEVICE, dtype=DTYPE) for shape in shapes]
    return [one.requires_grad_() for one in made]


def bounds(num_tokens: int, num_sequences: int) -> torch.Tensor:
    """Return the cumulative lengths of sequences of different lengths."""
    weights = torch.arange(num_sequences) + num_sequences
    inner = (weights.cumsum(0) * num_tokens // weights.sum())[:-1]
    return torch.tensor([0, *inner.tolist(), num_tokens], dtype=torch.int32, device=DEVICE)


def dense(cu_seqlens: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Softmax over all tokens, in float32."""
    tokens = torch.arange(len(query), device=DEVICE)
    number = torch.searchsorted(cu_seqlens, tokens, right=True)
    mask = (number[:, None] == number) & (tokens[:, None] >= tokens)
    key, value = (x.float().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * SIZE**-0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value).flatten(1)


def packed(module: PackedAttention, cu_seqlens: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    positions = torch.zeros(len(inputs[0]), device=DEVICE)  # nothing is rotated
    pack = Pack(cu_seqlens, cu_seqlens.diff().tolist(), positions)
    return module(*inputs, None, packed_seq_params=pack)


def with_gradients(attend, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    output = attend(*inputs)
    weights = torch.linspace(-1, 1, output.numel(), device=DEVICE).view_as(output)
    return [output.detach(), *torch.autograd.grad((output.float() * weights).sum(), inputs)]


def compare(way) -> None:
    cu_seqlens, inputs = bounds(CHECKED, 4), qkv(CHECKED)
    wanted = with_gradients(partial(dense, cu_seqlens), inputs)
    for found, expected in zip(with_gradients(partial(way, cu_seqlens), inputs), wanted, strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=3e-2, atol=3e-2)


def measure() -> dict:
    figures = {}
    with one_rank() as groups:
        ways = {"packed": frozenset()}
        if CUDA and platform.has_varlen_attn():
            ways["varlen_attn"] = frozenset({"varlen_attn"})
        else:
            figures["skipped"] = "varlen_attn needs CUDA and a torch whose takes groups of heads"
        for name, switches in ways.items():
            way = partial(packed, lone_attention(SIZE, switches, groups.collection))
            compare(way)
            for num_sequences in SEQUENCES:
                cu_seqlens, inputs = bounds(TOKENS, num_sequences), qkv(TOKENS)
                _, figure = measured(partial(with_gradients, partial(way, cu_seqlens), inputs))
                # Two products forwards and five backwards, over half of each sequence's square.
                flops = 7 * HEADS * SIZE * float(cu_seqlens.diff().double().square().sum())
                figure["tflops"] = flops / figure["seconds"] / 1e12
                figures |= {f"{name}_{num_sequences}_sequences_{key}": value for key, value in figure.items()}
    return {"stage": "attention", "tokens": TOKENS, **figures}


if __name__ == "__main__":
    report(measure)
