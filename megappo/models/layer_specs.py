"""Which modules a transformer layer is made of: TransformerEngine's, or torch-only ones that also run on a CPU."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.nn.attention.bias import causal_lower_right

from megappo import platform
from megappo.batch.zigzag import chunk_numbers
from megappo.config.errors import ConfigError
from megappo.models.context_parallel import whole_pack
from megappo.models.fused_layers import RMSNorm, swiglu
from megappo.models.latent_attention import LatentAttention


def layer_kind(wanted: str) -> str:
    """Whose layers model.layer_spec asks for: "torch" or "transformer_engine".

    Args:
        wanted: "auto" (TransformerEngine where it is installed with CUDA, else torch), "torch" or "transformer_engine".
    Raises:
        ConfigError: "transformer_engine" is asked for and cannot run here; or it is installed and cannot be imported.
    """
    if wanted == "torch" or (wanted == "auto" and not platform.has_transformer_engine()):
        return "torch"
    if not platform.has_transformer_engine():
        raise ConfigError(
            "model.layer_spec is transformer_engine, but TransformerEngine is not installed or CUDA is missing: "
            "install transformer-engine, or set model.layer_spec=torch"
        )
    if not HAVE_TE:  # megatron-core would build its layers of mocks
        raise ConfigError(
            f"model.layer_spec is {wanted}, but TransformerEngine is installed and cannot be imported "
            f"({platform.fault('transformer-engine')}): build it again, as docs/troubleshooting.md says, or "
            "set model.layer_spec=torch"
        )
    return "transformer_engine"


def layer_spec(config: TransformerConfig, kind: str, stage: int, chunk: int) -> TransformerBlockSubmodules:
    """The decoder of one chunk of a pipeline stage, as GPTModel's `transformer_layer_spec`. The component's groups are
    active.

    Args:
        kind: see `layer_kind`.
        stage, chunk: pipeline rank and the chunk's index on it, which say how many layers to build.
    """
    if layer_kind(kind) == "torch":
        return _torch_decoder(config, stage, chunk)
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk, pp_rank=stage)


def _torch_decoder(config: TransformerConfig, stage: int, chunk: int) -> TransformerBlockSubmodules:
    """Megatron's local layers, those of this chunk."""
    first = get_transformer_layer_offset(config, chunk, stage)
    numbers = range(first, first + get_num_layers_to_build(config, chunk, stage))
    dense, mixture = _torch_layer(config, None), _torch_layer(config, config.num_moe_experts)
    pattern = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * config.num_layers
    layers = [mixture if pattern[number] else dense for number in numbers]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _torch_layer(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    """Megatron's local layer with the modules replaced that refuse sequence parallelism and packed batches, or are
    slow."""
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    parts, attention = layer.submodules, layer.submodules.self_attention
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention.submodules.core_attention = PackedAttention
    if config.qk_layernorm:
        key_norm = "kv_layernorm" if config.multi_latent_attention else "k_layernorm"
        for name in ("q_layernorm", key_norm):
            setattr(attention.submodules, name, RMSNorm)
    if config.multi_latent_attention:
        attention.module = LatentAttention
    mlp = parts.mlp.submodules
    for part in (mlp,) if num_experts is None else (mlp.experts.submodules, mlp.shared_experts.submodules):
        part.activation_func = swiglu
    return layer


class PackedAttention(torch.nn.Module):
    """Causal self-attention within each sequence of a packed batch, without a mask over the whole pack.

    Sequences of equal length attend in one call. That costs time and memory as the sum of squared lengths; a dense mask
    would cost the square of the sum. With context parallelism the queries are this rank's, and every rank gathers all
    keys and values.
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

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [T, heads, D], the tokens held here of all sequences, one after the other.
            key: [T, groups, D], groups divides heads (grouped-query attention).
            value: as key, of any size: [T, groups, D'].
            attention_mask: None: each sequence is causal.
            packed_seq_params: cu_seqlens_q, int32 [sequences + 1], are the boundaries of the whole sequences.
        Returns:
            [T, heads * D'].
        Raises:
            ValueError: the batch is not packed.
        """
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError(
                "the torch layer spec takes packed batches only: pass PackedSeqParams(qkv_format='thd', ...)"
            )
        cu_seqlens = packed_seq_params.cu_seqlens_q
        key, value = (whole_pack(tensor, cu_seqlens, self.context) for tensor in (key, value))
        parts, places = [], []
        for place, whole in zip(_by_length(cu_seqlens // self.context.size()), _by_length(cu_seqlens), strict=True):
            parts.append(self._attend(query[place], key[whole], value[whole]).flatten(0, 1))
            places.append(place.flatten())
        return torch.cat(parts)[torch.cat(places).argsort()].flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Sequences of one length: query [sequences, length held here, heads, D], key and value [sequences, length,
        groups, D]."""
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        numbers = chunk_numbers(self.context.size(), self.context.rank())
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


def _by_length(cu_seqlens: torch.Tensor) -> list[torch.Tensor]:
    """Positions in the pack, [sequences, length] for each length there is: equal sequences need no padding."""
    lengths = cu_seqlens.diff()
    return [
        cu_seqlens[:-1][lengths == length, None] + torch.arange(length, device=cu_seqlens.device)
        for length in lengths.unique().tolist()
    ]
