"""TransformerEngine's kernels computed by torch, beneath megatron-core's Python code.

Like the real kernels, they never make the host read from the device.
"""

from unittest.mock import patch

import torch
import torch.nn.functional as F
from transformer_engine import pytorch as te


def compute() -> None:
    """Make the layers of `transformer_engine_stub.install` run, forward and backward, in this process."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    for layer, forward in (
        (te.Linear, _linear),
        (te.LayerNormLinear, _norm_and_linear),
        (te.RMSNorm, _norm),
        (te.DotProductAttention, _attention),
        (te.GroupedLinear, _grouped),
    ):
        patch.object(layer, "forward", forward).start()
    patch.object(rope_utils, "fused_apply_rotary_pos_emb_thd", _rotate).start()
    patch.object(moe_utils, "te_general_gemm", None).start()  # it then takes torch's
    patch.object(moe_utils, "fused_permute_with_probs", _permute).start()
    patch.object(moe_utils, "fused_unpermute", _unpermute).start()
    patch.object(moe_utils, "fused_sort_chunks_by_index", _sort_chunks).start()
    patch.object(moe_utils, "fused_sort_chunks_by_index_with_probs", _sort_chunks_and_probs).start()


def _linear(layer: te.Linear, x: torch.Tensor, **unused: object) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    bias = layer.bias if layer.use_bias else None
    if layer.te_return_bias:
        return F.linear(x, layer.weight), bias
    return F.linear(x, layer.weight, bias)


def _grouped(layer: te.GroupedLinear, x: torch.Tensor, m_splits: list[int], **unused: object) -> torch.Tensor:
    """Apply each expert's linear layer to its rows, which follow each other."""
    assert not layer.use_bias and type(m_splits) is list
    parts = [F.linear(part, getattr(layer, f"weight{i}")) for i, part in enumerate(x.split(m_splits))]
    return torch.cat(parts)


def _permute(
    tokens: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort tokens by their experts, in their order within each; with the probabilities and the tokens' indices."""
    places = routing_map.T.flatten().int().argsort(descending=True, stable=True)[:num_out_tokens]
    expert, token = places // len(tokens), places % len(tokens)
    return tokens[token], probs[token, expert], token


def _unpermute(
    permuted: torch.Tensor, token: torch.Tensor, merging_probs: None, restore_shape: torch.Size
) -> torch.Tensor:
    """Sum the experts' outputs of each token."""
    assert merging_probs is None
    return permuted.new_zeros(restore_shape).index_add(0, token, permuted)


def _sort_chunks(x: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Reorder consecutive chunks of rows."""
    starts, ends, places = sizes.cumsum(0) - sizes, sizes[order].cumsum(0), torch.arange(len(x))
    chunk = torch.searchsorted(ends, places, right=True)
    return x[places + (starts[order] + sizes[order] - ends)[chunk]]


def _sort_chunks_and_probs(
    x: torch.Tensor, probs: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _sort_chunks(x, sizes, order), _sort_chunks(probs, sizes, order)


def _norm_and_linear(layer: te.LayerNormLinear, x: torch.Tensor, **unused: object) -> object:
    return _linear(layer, _normed(layer, x, layer.layer_norm_weight))


def _norm(layer: te.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return _normed(layer, x, layer.weight)


def _normed(layer: te.LayerNormLinear | te.RMSNorm, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight + 1 if layer.zero_centered_gamma else weight, layer.eps)


def _attention(
    layer: te.DotProductAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    cu_seqlens_q: torch.Tensor,
    **unused: object,
) -> torch.Tensor:
    """Attention of [T, heads, D] tensors with a mask over the whole pack; returns [T, heads x D]."""
    number, place = _sequences(len(query), cu_seqlens_q)
    mask = (number[:, None] == number) & (place[:, None] >= place)
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    found = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=layer.unfused_attention.softmax_scale, enable_gqa=True
    )
    return found[0].transpose(0, 1).flatten(1)


def _rotate(
    x: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, cp_size: int = 1, cp_rank: int = 0
) -> torch.Tensor:
    """Rotate the first numbers of [T, heads, D], as many as have angles, by the position of each token in its
    sequence."""
    angles = freqs[_sequences(len(x), cu_seqlens)[1], :, 0]
    turned, others = x.tensor_split([angles.shape[-1]], dim=-1)
    half = turned.chunk(2, dim=-1)
    turned = turned * angles.cos() + torch.cat([-half[1], half[0]], dim=-1) * angles.sin()
    return torch.cat([turned, others], dim=-1)


def _sequences(num_tokens: int, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's sequence number in a pack and its position in that sequence."""
    tokens = torch.arange(num_tokens, device=cu_seqlens.device)
    number = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    return number, tokens - cu_seqlens[number]
