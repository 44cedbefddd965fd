"""Kernels of torch's attention on a GPU that do not keep every head's scores. They compute nothing here;
varlen_attn computes what its documentation promises."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lone_attention import lone_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends.cuda import SDPAParams
from torch.nn.attention import bias, varlen
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from megappo.models import packed_attention

HEADS, END, SIZE = 8, 96, 64


class Operators(TorchDispatchMode):
    """Record the names of the operators called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def made(*switches: str) -> packed_attention.PackedAttention:
    one_rank = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return lone_attention(SIZE, switches, SimpleNamespace(cp=one_rank, tp=one_rank))


def attend(dtype: torch.dtype, groups: int, value_size: int, chunk: int) -> list[str]:
    """The operators of the last queries of a sequence on a GPU."""
    attention = made()
    shapes = (chunk, HEADS, SIZE), (END, groups, SIZE), (END, groups, value_size)
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype).to(torch.device("cuda", 0)) for shape in shapes]
        with Operators() as operators:
            assert attention._attend_block(*tensors).shape == (chunk, HEADS, value_size)
    return operators.names


def flash_takes(params: SDPAParams) -> bool:
    query, value = params.query, params.value
    return query.dtype == torch.bfloat16 and query.shape[-1] == value.shape[-1] and params.attn_mask is None


def efficient_takes(params: SDPAParams) -> bool:
    return params.query.shape[1] == params.key.shape[1]


@pytest.mark.parametrize(
    ("dtype", "groups", "value_size", "kernel"),
    [
        (torch.bfloat16, 2, SIZE, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, HEADS, 48, "_efficient_attention_forward"),  # latent attention
        (torch.float32, 2, SIZE, "_efficient_attention_forward"),
    ],
)
def test_a_share_of_a_sequence_takes_a_kernel_that_keeps_no_scores(
    dtype: torch.dtype, groups: int, value_size: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What torch's kernels take. Source: PyTorch 2.13's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    monkeypatch.setattr(bias, "can_use_flash_attention", flash_takes)
    monkeypatch.setattr(bias, "can_use_efficient_attention", efficient_takes)
    mask = bias.causal_lower_right(32, END)  # made here: it cannot be where operators are noted
    monkeypatch.setattr(bias, "causal_lower_right", lambda *size: mask)
    names = attend(dtype, groups, value_size, chunk=32)
    assert kernel in names and not {"bmm", "ones"} & {*names}


@pytest.mark.parametrize(("dtype", "groups"), [(torch.bfloat16, 2), (torch.float32, HEADS)])
def test_groups_in_fp32_are_spread_over_their_heads(
    dtype: torch.dtype, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def record(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> torch.Tensor:
        found.append((key.shape[1], value.shape[1], options["attn_mask"], options["is_causal"]))
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    attend(dtype, 2, SIZE, chunk=END)
    assert found == [(groups, groups, None, True)]


BOUNDS = torch.tensor([0, 5, 6, 14, 17], dtype=torch.int32)


def qkv() -> list[torch.Tensor]:
    """Inputs for a pack, with groups; values are a part of a larger tensor, as Megatron's are."""
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(17, heads, size, generator=generator, dtype=torch.bfloat16)
        for heads, size in ((HEADS, SIZE), (2, SIZE), (2, 2 * SIZE))
    )
    return [query.requires_grad_(), key.requires_grad_(), value.requires_grad_()[..., SIZE:]]


def attend_to_pack(*switches: str) -> list[torch.Tensor]:
    """The output, and the gradients, of a pack's attention."""
    query, key, value = qkv()
    pack = packed_attention.Pack(BOUNDS, BOUNDS.diff().tolist(), torch.zeros(17))
    output = made(*switches)(query, key, value, None, packed_seq_params=pack)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return [output, *torch.autograd.grad((output.float() * weights).sum(), [query, key, value])]


def sequences(bounds: torch.Tensor, scale: float, query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple]:
    """Each sequence's place and its causal attention's probabilities, [heads, length, length]."""
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        here = slice(start, end)
        k = key[here].float().repeat_interleave(HEADS // 2, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[here].float(), k) * scale
        later = torch.ones(end - start, end - start).triu(1).bool()
        yield here, scores.masked_fill(later, -torch.inf).softmax(-1)


def as_documented(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float,
    window_size: list[int],
    enable_gqa: bool,
    *others: None,
) -> tuple[torch.Tensor, ...]:
    """varlen_attn as it is documented, a loop over sequences. Source: PyTorch 2.13, torch.nn.attention."""
    assert enable_gqa and is_causal and window_size == [-1, 0] and not any(others)
    assert cu_seq_q.dtype == torch.int32 and query.dtype == torch.bfloat16 and torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    output = torch.empty(query.shape)
    for here, p in sequences(cu_seq_q, scale, query, key):
        output[here] = torch.einsum("hqk,khd->qhd", p, value[here].float().repeat_interleave(HEADS // 2, dim=1))
    return output.to(query.dtype), torch.zeros(HEADS, len(query)), torch.zeros(2, dtype=torch.uint64)


def gradients_as_documented(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: object
) -> tuple[torch.Tensor, ...]:
    """dv = p^T do, ds = p (do v^T - sum), dq = ds k, dk = ds^T q; the gradients of a group added up."""
    cu_seq_q, scale = arguments[2], arguments[8]
    found = [torch.empty(one.shape) for one in (query, key, value)]
    for here, p in sequences(cu_seq_q, scale, query, key):
        q, do = query[here].float(), grad[here].float()
        k, v = (one[here].float().repeat_interleave(HEADS // 2, dim=1) for one in (key, value))
        dp = torch.einsum("qhd,khd->hqk", do, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        found[0][here] = torch.einsum("hqk,khd->qhd", ds, k)
        found[1][here] = torch.einsum("hqk,qhd->khd", ds, q).unflatten(1, (2, -1)).sum(2)
        found[2][here] = torch.einsum("hqk,qhd->khd", p, do).unflatten(1, (2, -1)).sum(2)
    return tuple(one.to(query.dtype) for one in found)


def test_one_kernel_for_a_pack_gives_what_a_call_for_each_sequence_does() -> None:
    expected = attend_to_pack()
    varlen._varlen_attn.register_kernel("cpu", as_documented)
    varlen._varlen_attn_backward.register_kernel("cpu", gradients_as_documented)
    found = attend_to_pack("varlen_attn")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)


def test_a_pack_is_rotated_as_hugging_face_does() -> None:
    lengths = (30, 1, 40)
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])
    pack = packed_attention.Pack(bounds, list(lengths), positions)
    angles = torch.outer(torch.arange(40.0), 10000 ** -torch.linspace(0, 1, SIZE // 2)).repeat(1, 2)
    of_tokens = angles[positions]
    inputs = [torch.randn(sum(lengths), HEADS, SIZE, requires_grad=True) for _ in range(3)]
    query, key, value = inputs
    found = made()(*inputs, None, packed_seq_params=pack, attention_bias=angles[:, None, None])
    rotated = apply_rotary_pos_emb(query, key, of_tokens.cos(), of_tokens.sin(), unsqueeze_dim=1)
    expected = made()(*rotated, value, None, packed_seq_params=pack)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    gradients, of_expected = (torch.autograd.grad((one * weights).sum(), inputs) for one in (found, expected))
    for one, other in zip([found, *gradients], [expected, *of_expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
