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

from megappo.batch.zigzag import chunk_numbers, held_positions, positions_within
from megappo.models.context_parallel import whole_pack

ROTATED_AT_A_TIME = {"cpu": 2**17, "cuda": 2**62}
"""Numbers of queries or keys, by device: on a CPU as many as its caches hold, as each is read twice and written twice;
that takes a quarter less time than all of a pack at once."""


class SelfAttention(attention.SelfAttention):
    """Megatron's self-attention, which leaves it to PackedAttention to rotate queries and keys by their positions.

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
        if attention_bias is not None:
            rotation = _pack(cu_seqlens).rotation(attention_bias, query.dtype, self.context)
            query, key = (_Rotated.apply(tensor, *rotation) for tensor in (query, key))
        if self.is_one_kernel:
            return self._attend_at_once(query, key, value, packed_seq_params).flatten(1)
        pack = _pack(cu_seqlens)
        key, value = (whole_pack(tensor, cu_seqlens, self.context) for tensor in (key, value))
        lengths = [len(run) * run[0] for run in pack.runs]
        shares = [length // self.context.size() for length in lengths]
        parts = [
            self._attend(*(tensor.unflatten(0, (len(run), -1)) for tensor in of_run)).flatten(0, 1)
            for run, *of_run in zip(
                pack.runs, query.split(shares), key.split(lengths), value.split(lengths), strict=True
            )
        ]
        return torch.cat(parts).flatten(1)

    def _attend_at_once(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: PackedSeqParams
    ) -> torch.Tensor:
        """By torch's flash attention over a pack: [T, heads, D]."""
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
        """Sequences of one length: query [sequences, length held here, heads, D], key and value [sequences, length,
        groups, D]."""
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        numbers = chunk_numbers(self.context.size(), self.context.rank())
        if len(numbers) == 1:  # as below, without copies of the whole, of which the backward pass makes more
            return self._attend_chunk(query, key, value).transpose(1, 2)
        chunks = query.chunk(len(numbers), dim=2)
        ends = [(number + 1) * chunk.shape[2] for number, chunk in zip(numbers, chunks, strict=True)]
        parts = [
            self._attend_chunk(chunk, key[:, :, :end], value[:, :, :end])
            for chunk, end in zip(chunks, ends, strict=True)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)

    def _attend_chunk(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Queries [sequences, heads, chunk, D] of the last tokens of [sequences, groups, end, D].

        Of torch's kernels for GPUs those that keep no scores take no mask that is laid out and, in fp32, no groups.
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
    """What every layer needs to know of a pack, read from the device and computed once.

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
        """Of the tokens held here cosine [T, 1, D] and sine [T, 1, D / 2].

        Args:
            angles: [positions, 1, 1, D], the same in either half of D.
        """
        key = angles.data_ptr(), dtype
        if key not in self._rotations:
            starts = torch.tensor([0, *self.lengths]).cumsum(0)
            positions = positions_within(starts, sum(self.lengths))
            held = positions[held_positions(starts, context.size(), context.rank())].to(angles.device)
            of_held = angles[held, 0]
            sine = of_held[..., : of_held.shape[-1] // 2].sin()
            # The angles are kept as well, so that none others come to lie where they do.
            self._rotations[key] = of_held.cos().to(dtype), sine.to(dtype), angles
        cosine, sine, _ = self._rotations[key]
        return cosine, sine


def _pack(cu_seqlens: torch.Tensor) -> _Pack:
    if cu_seqlens not in _PACKS:
        _PACKS[cu_seqlens] = _Pack(cu_seqlens)
    return _PACKS[cu_seqlens]


_PACKS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By their cu_seqlens, as long as those live."""


class _Rotated(torch.autograd.Function):
    """Vectors [T, heads, D], of which each pair (i, i + D / 2) is rotated by an angle."""

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(vectors, cosine, sine, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotate(grad, *ctx.saved_tensors, -1), None, None


def _rotate(vectors: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, direction: int) -> torch.Tensor:
    rotated = torch.empty_like(vectors, memory_format=torch.contiguous_format)
    at_a_time = max(ROTATED_AT_A_TIME[vectors.device.type] // vectors.shape[1:].numel(), 1)
    for part in zip(*(tensor.split(at_a_time) for tensor in (vectors, rotated, cosine, sine)), strict=True):
        _rotate_into(*part, direction)
    return rotated


def _rotate_into(
    vectors: torch.Tensor, rotated: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, direction: int
) -> None:
    torch.mul(vectors, cosine, out=rotated)
    (x, y), (new_x, new_y) = vectors.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    new_x.addcmul_(y, sine, value=-direction)
    new_y.addcmul_(x, sine, value=direction)
