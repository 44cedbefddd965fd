"""Attention of the torch-only layers: causal within each sequence of a packed batch."""

from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig, attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakIdKeyDictionary

from megappo.batch.packing import chunk_numbers, held_positions, positions_within
from megappo.models.context_parallel import whole_pack


class SelfAttention(attention.SelfAttention):
    """Megatron's self-attention, in which PackedAttention rotates queries and keys by their positions.

    Megatron itself reads the lengths from the device, and makes cosines and sines, twice in each layer.
    """

    def forward(self, *args: Any, rotary_pos_emb: torch.Tensor | None = None, **options: Any) -> tuple:
        # Megatron hands attention_bias on to core attention as it is.
        return super().forward(*args, **options | {"attention_bias": rotary_pos_emb})


class PackedAttention(torch.nn.Module):
    """Causal self-attention within each sequence of a packed batch, without a mask over the whole pack.

    Where torch has a kernel for it, all attend at once; else neighbours of equal length in one call. That costs time
    and memory as the sum of squared lengths; a dense mask would cost the square of the sum. With context parallelism
    the queries are this rank's, and every rank gathers all keys and values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **unused: Any,
    ):
        super().__init__()
        self.context = pg_collection.cp
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.is_one_kernel = "varlen_attn" in config.switches

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        attention_bias: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [T, heads, D], the tokens held here of all sequences, one after the other.
            key: [T, groups, D], groups divides heads (grouped-query attention).
            value: as key, of any size: [T, groups, D'].
            attention_mask: None: each sequence is causal.
            packed_seq_params: cu_seqlens_q, int32 [sequences + 1], are the boundaries of the whole sequences.
            attention_bias: no bias, but the angles [positions, 1, 1, D] by which to rotate query and key; None where
                they are rotated already.
        Returns:
            [T, heads * D'].
        Raises:
            ValueError: the batch is not packed.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("PackedAttention takes packed batches only: pass packed_seq_params with qkv_format 'thd'")
        cu_seqlens = packed_seq_params.cu_seqlens_q
        pack = _pack(cu_seqlens)
        if attention_bias is not None:
            rotation = pack.rotation(attention_bias, query.dtype, self.context)
            query, key = _rotate(query, *rotation), _rotate(key, *rotation)
        if self.is_one_kernel:
            return self._attend_at_once(query, key, value, packed_seq_params).flatten(1)
        key, value = (whole_pack(tensor, cu_seqlens, self.context) for tensor in (key, value))
        lengths = [len(run) * run[0] for run in pack.runs]
        shares = [length // self.context.size() for length in lengths]
        runs = zip(pack.runs, query.split(shares), key.split(lengths), value.split(lengths), strict=True)
        parts = []
        for run, *tensors in runs:
            sequences = (tensor.unflatten(0, (len(run), -1)) for tensor in tensors)
            parts.append(self._attend(*sequences).flatten(0, 1))
        return torch.cat(parts).flatten(1)

    def _attend_at_once(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: PackedSeqParams
    ) -> torch.Tensor:
        """Attend by torch's flash attention of packs: [T, heads, D]."""
        return varlen_attn(
            query,
            key,
            value,
            bounds.cu_seqlens_q,
            bounds.cu_seqlens_kv,
            bounds.max_seqlen_q,
            bounds.max_seqlen_kv,
            scale=self.scale,
            window_size=(-1, 0),  # causal
            enable_gqa=True,
        )

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend in sequences of one length: query [sequences, length held here, heads, D], key and value [sequences,
        length, groups, D]."""
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        numbers = chunk_numbers(self.context.size(), self.context.rank())
        if len(numbers) == 1:  # as below, without copies of the whole
            return self._attend_chunk(query, key, value).transpose(1, 2)
        chunks = query.chunk(len(numbers), dim=2)
        ends = [(number + 1) * chunk.shape[2] for number, chunk in zip(numbers, chunks, strict=True)]
        parts = [
            self._attend_chunk(chunk, key[:, :, :end], value[:, :, :end])
            for chunk, end in zip(chunks, ends, strict=True)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)

    def _attend_chunk(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend with queries [sequences, heads, chunk, D] of the last tokens of [sequences, groups, end, D].

        torch's kernels for GPUs that keep no scores take no dense mask and, in fp32, no groups.
        """
        if query.is_cuda and query.dtype == torch.float32:
            heads_of_group = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(heads_of_group, dim=1) for tensor in (key, value))
        chunk, end = query.shape[2], key.shape[2]
        mask = causal_lower_right(chunk, end) if chunk < end else None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )


class _Pack:
    """Lengths and rotations of a pack, which every layer needs, read from the device and computed once.

    Attributes:
        lengths: of the sequences. runs: these, equal neighbours together.
    """

    def __init__(self, cu_seqlens: torch.Tensor):
        self.lengths = cu_seqlens.diff().tolist()
        self.runs = [list(same) for _, same in groupby(self.lengths)]
        self._rotations: dict[tuple, tuple[torch.Tensor, ...]] = {}

    def rotation(
        self, angles: torch.Tensor, dtype: torch.dtype, context: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the tokens held here, [T, 1, D] each.

        Args:
            angles: [positions, 1, 1, D], the same in either half of D.
        """
        key = angles.data_ptr(), dtype
        if key not in self._rotations:
            starts = torch.tensor([0, *self.lengths]).cumsum(0)
            positions = positions_within(starts, sum(self.lengths))
            held = positions[held_positions(starts, context.size(), context.rank())].to(angles.device)
            of_held = angles[held, 0]
            # The angles are kept as well, so that no others come to lie where they do.
            self._rotations[key] = of_held.cos().to(dtype), of_held.sin().to(dtype), angles
        cosine, sine, _ = self._rotations[key]
        return cosine, sine


def _rotate(vectors: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + D / 2) of the vectors [T, heads, D] by an angle."""
    first, second = vectors.chunk(2, dim=-1)
    return vectors * cosine + torch.cat((-second, first), dim=-1) * sine


def _pack(cu_seqlens: torch.Tensor) -> _Pack:
    """The pack with these boundaries, kept as long as they live."""
    if cu_seqlens not in _PACKS:
        _PACKS[cu_seqlens] = _Pack(cu_seqlens)
    return _PACKS[cu_seqlens]


_PACKS: WeakIdKeyDictionary = WeakIdKeyDictionary()
