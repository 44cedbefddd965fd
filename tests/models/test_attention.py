"""What torch's attention asks of a GPU: kernels that do not keep every head's scores. Nothing is computed here."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.backends.cuda import SDPAParams
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.models import packed_attention

HEADS, END, SIZE = 8, 96, 64


class Operators(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def attend(dtype: torch.dtype, groups: int, value_size: int, chunk: int) -> list[str]:
    """The operators of the last queries of two sequences on a GPU."""
    attention = packed_attention.PackedAttention(SimpleNamespace(kv_channels=SIZE), SimpleNamespace(cp=None))
    shapes = (chunk, HEADS, SIZE), (END, groups, SIZE), (END, groups, value_size)
    with FakeTensorMode():
        tensors = [torch.empty(2, *shape, dtype=dtype).to(torch.device("cuda", 0)).transpose(1, 2) for shape in shapes]
        with Operators() as operators:
            assert attention._attend_chunk(*tensors).shape == (2, HEADS, chunk, value_size)
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
    monkeypatch.setattr(packed_attention, "causal_lower_right", lambda *size: mask)
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
