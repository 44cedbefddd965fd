"""Attention of the torch-only layers: causal within each sequence of a packed batch."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig, attention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megappo.architecture.switches import FLASH_HEAD_SIZE
from megappo.batch.images import ImageSource
from megappo.batch.packing import PackedBatch, chunk_numbers, held_positions
from megappo.models.cut_parameters import CutParameters


class Pack(PackedSeqParams):
    """Megatron's description of a packed batch, with what the torch-only layers would have to read from the device.

    Args:
        cu_seqlens: [sequences + 1] int32, boundaries of the whole sequences.
        lengths: lengths of the whole sequences.
        positions: [T] int64, of the tokens held here in their sequences.
        token_rows, expert_choices: as of `PackedBatch`, of the tokens that a router here gets.
        image_slots: as of `PackedBatch`, of the tokens whose embeddings are here.
    Attributes:
        packed, image_source: the batch, and the source of its images.
        angles, image_places, deepstack: see `models.vision_tower`.
    """

    packed: PackedBatch
    image_source: ImageSource
    angles: Tensor
    image_places: Tensor
    deepstack: Sequence[Tensor]

    def __init__(
        self,
        cu_seqlens: Tensor,
        lengths: list[int],
        positions: Tensor,
        token_rows: Tensor | None = None,
        expert_choices: Tensor | None = None,
        image_slots: Tensor | None = None,
    ):
        longest = max(lengths)
        super().__init__(
            "thd",
            cu_seqlens,
            cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        self.lengths = lengths
        self.positions = positions
        self.token_rows = token_rows
        self.expert_choices = expert_choices
        self.image_slots = image_slots


class SelfAttention(attention.SelfAttention):
    """Megatron's self-attention, in which PackedAttention rotates queries and keys by their positions.

    Megatron itself reads the lengths from the device twice in each layer.
    """

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **options: Any) -> tuple:
        is_unrotated = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        rotary_pos_emb = None if is_unrotated else rotary_pos_emb
        # Megatron hands attention_bias on to core attention as it is.
        return super().forward(*args, **options | {"attention_bias": rotary_pos_emb})


class MropeAttention(attention.SelfAttention):
    """Self-attention that rotates queries and keys by the pack's angles, with either library's layers.

    Neither Megatron nor TransformerEngine does: Megatron cuts angles for context parallelism as if a pack were one
    sequence, and TransformerEngine's kernel counts positions up from 0 (megatron-core 0.16.1, rope_utils.py).
    """

    _angles: Tensor

    def forward(
        self, *args: Any, rotary_pos_emb: Tensor | None = None, packed_seq_params: Pack, **options: Any
    ) -> tuple:
        self._angles = packed_seq_params.angles
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Return queries, keys and values, [T, 1, heads, D] each."""
        query, key, value = super().get_query_key_value_tensors(*args, **options)
        angles = self._angles[:, None]
        cosine = angles.cos().to(query.dtype)
        sine = angles.sin().to(query.dtype)
        return _rotated(query, cosine, sine, False), _rotated(key, cosine, sine, False), value


class NormedValueAttention(SelfAttention):
    """Attention whose values have norms without weights, and may be the same projection as the keys."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if config.keys_are_values:
            rows = self.query_projection_size + self.kv_projection_size
            weight = self.linear_qkv.weight
            weight.data = weight.data[: rows // self.pg_collection.tp.size()].clone()

    def get_query_key_value_tensors(self, hidden_states: Tensor, *unused: Any, **options: Any) -> tuple[Tensor, ...]:
        """Return queries, keys and values, [T, 1, heads, D] each."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        size = self.hidden_size_per_attention_head
        mixed = mixed.view(*mixed.shape[:2], groups, -1, size)
        num_queries = self.num_attention_heads_per_partition // groups
        query = mixed[..., :num_queries, :]
        key = mixed[..., num_queries, :]
        value = mixed[..., -1, :]
        value = F.rms_norm(value, (size,), eps=self.config.layernorm_epsilon)
        return self.q_layernorm(query.flatten(2, 3)), self.k_layernorm(key), value


class PackedAttention(CutParameters):
    """Causal self-attention within each sequence of a packed batch, without a mask over the whole pack.

    Its weights are attention sinks, if the model has any, under Megatron's name.

    Where torch has a kernel for it, all sequences attend at once; else one after the other. With context parallelism
    the queries are this rank's, and every rank gathers all keys and values.
    """

    cut = MappingProxyType({"softmax_offset": 0})

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        layer_number: int,
        softmax_scale: float | None = None,
        **unused: Any,
    ):
        super().__init__()
        self.context = pg_collection.cp
        self.scale = softmax_scale or config.kv_channels**-0.5
        is_limited = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if is_limited else None  # tokens that one attends to, with itself
        self.rotates_neighbours = config.rotary_interleaved
        self.is_one_kernel = "varlen_attn" in config.switches and config.kv_channels <= FLASH_HEAD_SIZE
        self.magnitude = _yarn_get_concentration_factor_from_config(config)
        self.tp_group = pg_collection.tp
        self.register_parameter("softmax_offset", None)
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(
                self.softmax_offset,
                is_parallel=True,
                dim=0,
                stride=1,
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Pack,
        attention_bias: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            query: [T, heads, D], the tokens held here of all sequences, one after the other.
            key: [T, groups, D], groups divides heads (grouped-query attention).
            value: as key, of any size: [T, groups, D'].
            attention_mask: None: each sequence is causal.
            attention_bias: no bias, but the angles [positions, 1, 1, R] by which to rotate the first R numbers of query
                and key, each twice: in either half of R, or side by side; None where they are rotated already.
        Returns:
            [T, heads * D'].
        """
        pack = packed_seq_params
        if attention_bias is not None:
            angles = attention_bias[pack.positions, 0]
            cosine = (angles.cos() * self.magnitude).to(query.dtype)
            sine = (angles.sin() * self.magnitude).to(query.dtype)
            query = _rotated(query, cosine, sine, self.rotates_neighbours)
            key = _rotated(key, cosine, sine, self.rotates_neighbours)
        if self.is_one_kernel:
            from torch.nn.attention.varlen import varlen_attn  # here, as it imports torch's compiler: 0.4 s of CPU

            return varlen_attn(
                query,
                key,
                value,
                pack.cu_seqlens_q,
                pack.cu_seqlens_kv,
                pack.max_seqlen_q,
                pack.max_seqlen_kv,
                scale=self.scale,
                window_size=(self.window - 1 if self.window else -1, 0),  # causal
                enable_gqa=True,
            ).flatten(1)
        queries = query.split([length // self.context.size() for length in pack.lengths])
        keys = whole_pack(key, pack.cu_seqlens_kv, self.context).split(pack.lengths)
        values = whole_pack(value, pack.cu_seqlens_kv, self.context).split(pack.lengths)
        sequences = zip(queries, keys, values, strict=True)
        return torch.cat([self._attend(*sequence) for sequence in sequences]).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend in one sequence: each chunk of queries that this rank holds, to all keys up to its end."""
        numbers = chunk_numbers(self.context.size(), self.context.rank())
        parts = []
        for number, chunk in zip(numbers, query.chunk(len(numbers)), strict=True):
            end = number * len(chunk)
            for block in chunk.split(self.window or len(chunk)):
                end += len(block)
                start = max(0, end - len(block) - self.window + 1) if self.window else 0
                parts.append(self._attend_block(block, key[start:end], value[start:end]))
        return torch.cat(parts)

    def _attend_block(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with queries [block, heads, D] of the last of the tokens [end, groups, D].

        torch's kernels for GPUs that keep no scores take no dense mask and, in fp32 or for large heads, no groups.
        """
        if query.is_cuda and (query.dtype == torch.float32 or query.shape[-1] > FLASH_HEAD_SIZE):
            heads_of_group = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(heads_of_group, dim=1) for tensor in (key, value))
        mask = None
        if self.window:
            numbers = torch.arange(len(key), device=key.device)
            distance = numbers[-len(query) :, None] - numbers
            mask = (distance >= 0) & (distance < self.window)
        if self.softmax_offset is not None:
            query, key, value = _with_sinks(query, key, value, self.softmax_offset / self.scale)
            mask = None if mask is None else F.pad(mask, (1, 0), value=True)
        if mask is None and len(query) < len(key):
            from torch.nn.attention.bias import causal_lower_right  # here, for the same reason

            mask = causal_lower_right(len(query), len(key))
        by_head = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
        output = F.scaled_dot_product_attention(
            *by_head, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return output.squeeze(0).transpose(0, 1)


def _with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key before the others, whose product with a query is its head's sink, and whose value is 0.

    Queries get further numbers for it, which meet zeros in other keys: 8, as torch's kernels want a multiple of that.

    Args:
        query, key, value: as `PackedAttention.forward` takes them.
        sinks: [heads].
    """
    further = F.pad(sinks.to(query.dtype)[:, None], (0, 7)).expand(len(query), -1, -1)
    sink = F.pad(key.new_ones(1, key.shape[1], 1), (key.shape[-1], 7))
    return (
        torch.cat((query, further), dim=-1),
        torch.cat((sink, F.pad(key, (0, 8)))),
        F.pad(value, (0, 0, 0, 0, 1, 0)),
    )


def whole_pack(share: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every token's values, in the pack's order; their gradients go back to the rank that holds the token.

    Args:
        share: [T / size, ...], of the tokens that this rank holds.
        cu_seqlens: [sequences + 1] boundaries of the whole sequences.
        group: ranks that hold the shares; every one of them calls, in the backward pass too.
    Returns:
        [T, ...].
    """
    if group.size() == 1:
        return share
    gathered = gather_from_sequence_parallel_region(share, group=group)
    held = torch.cat([held_positions(cu_seqlens, group.size(), rank) for rank in range(group.size())])
    return gathered.index_select(0, held.argsort())


def _rotated(vectors: Tensor, cosine: Tensor, sine: Tensor, neighbours: bool) -> Tensor:
    """Rotate each pair (i, i + R / 2), or (2 i, 2 i + 1), of the first R numbers of vectors [T, heads, D] by the angles
    of [T, 1, R]."""
    size = cosine.shape[-1]
    if size < vectors.shape[-1]:
        rotated = _rotated(vectors[..., :size], cosine, sine, neighbours)
        return torch.cat((rotated, vectors[..., size:]), dim=-1)
    if neighbours:
        first, second = vectors.unflatten(-1, (-1, 2)).unbind(-1)
        return vectors * cosine + torch.stack((-second, first), dim=-1).flatten(-2) * sine
    first, second = vectors.chunk(2, dim=-1)
    return vectors * cosine + torch.cat((-second, first), dim=-1) * sine
