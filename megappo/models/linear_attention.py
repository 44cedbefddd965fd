"""Linear attention by the gated delta rule within each sequence of a packed batch, and attention with an output gate:
the layers of Qwen3-Next and Qwen3.5. Megatron's own refuses packed batches (megatron-core 0.16.1, gated_delta_net.py).

Source: Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule"; transformers 5,
modeling_qwen3_next.py.
"""

from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig, attention
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from megappo.architecture.architecture import DELTA_CHUNK
from megappo.models.cut_parameters import CutParameters
from megappo.models.packed_attention import Pack, SelfAttention


class GatedDeltaNet(CutParameters):
    """Linear attention. Tensor-parallel ranks cut it by heads; with sequence parallelism its linear layers exchange
    tokens as attention's do.

    Each key head has a query, a key, and one or several value heads, each with an output gate, a rate of writing (beta)
    and a decay of its state.

    Args:
        submodules: attention's submodules, of which it takes the two linear layers.
    """

    cut = MappingProxyType({"conv1d": 0, "A_log": 0, "dt_bias": 0})

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ):
        super().__init__()
        self.config = config
        self.tp_group = pg_collection.tp
        key_heads = config.linear_num_key_heads
        value_heads = config.linear_num_value_heads
        key = config.linear_key_head_dim
        self.value_size = config.linear_value_head_dim
        per_key = value_heads // key_heads
        self.key_heads = key_heads // self.tp_group.size()
        self.qkv_sizes = [key, key, per_key * self.value_size]
        self.sizes = [sum(self.qkv_sizes), per_key * self.value_size, per_key, per_key]
        layer = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            key_heads * sum(self.sizes),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **layer,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            value_heads * self.value_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **layer,
        )
        self.conv1d = self._sharded(self.key_heads * sum(self.qkv_sizes), 1, config.linear_conv_kernel_dim)
        self.A_log, self.dt_bias = self._sharded(self.key_heads * per_key), self._sharded(self.key_heads * per_key)
        self.norm = torch.nn.Parameter(torch.empty(self.value_size, dtype=config.params_dtype))

    def _sharded(self, *shape: int) -> torch.nn.Parameter:
        """Return a parameter of which each tensor-parallel rank has some rows."""
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def forward(
        self, hidden_states: Tensor, attention_mask: None, *, packed_seq_params: Pack, **unused: Any
    ) -> tuple[Tensor, None]:
        """[T, 1, hidden] -> [T, 1, hidden], and None: there is no bias to add."""
        mixed, _ = self.linear_qkv(hidden_states)
        mixed = mixed.view(len(mixed), self.key_heads, -1)
        qkv, gate, beta, decay = mixed.split(self.sizes, dim=-1)
        convolved = causal_convolution(qkv.flatten(1), self.conv1d[:, 0], packed_seq_params.positions)
        query, key, value = convolved.view_as(qkv).split(self.qkv_sizes, dim=-1)
        value = value.reshape(len(value), -1, self.value_size)
        decay = -self.A_log.float().exp() * F.softplus(decay.flatten(1).float() + self.dt_bias)
        rule = kernel_delta_rule if "delta_rule_kernel" in self.config.switches else delta_rule
        output = rule(query, key, value, decay, beta.flatten(1).sigmoid(), packed_seq_params)
        output = self._gated_norm(output, gate.reshape(output.shape))
        return self.linear_proj(output.flatten(1)[:, None])

    def _gated_norm(self, output: Tensor, gate: Tensor) -> Tensor:
        """Normalise each head's output and multiply it by its gate. Ranks have other heads, but the same weight."""
        weight = copy_to_tensor_model_parallel_region(self.norm, group=self.tp_group)
        normalised = F.rms_norm(output.float(), (self.value_size,), eps=self.config.layernorm_epsilon)
        return (weight * normalised.to(gate.dtype) * F.silu(gate.float())).to(gate.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Return the state, with the state of the linear layers."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name, module in self.named_children():
            state |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return state


def causal_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Return silu of the sum of each channel's last few numbers in its sequence, each times a weight.

    Args:
        x: [T, channels].
        weight: [channels, kernel]; the last column is for the token itself.
        positions: [T], of the tokens in their sequences.
    """
    kernel = weight.shape[1]
    total = x * weight[:, -1]
    for back in range(1, kernel):
        earlier = F.pad(x, (0, 0, back, 0))[: len(x)]
        earlier = torch.where(positions[:, None] >= back, earlier, 0)
        total = total + earlier * weight[:, kernel - 1 - back]
    return F.silu(total)


def kernel_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    pack: Pack,
) -> Tensor:
    """Compute `delta_rule` by the kernels of the package fla-core (0.6.0)."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # here, as the package is optional

    output, _ = chunk_gated_delta_rule(
        *(tensor.contiguous()[None] for tensor in (query, key, value)),
        g=decay[None],
        beta=beta[None],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=pack.cu_seqlens_q.long(),
    )
    return output[0]


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    pack: Pack,
) -> Tensor:
    """Return what queries read from the state of their sequence, which keys and values write, in fp32.

    The state S [K, V] of a head starts with 0. Each token multiplies it by exp(decay), adds k^T beta (v - k S), and
    reads q S; q and k have length 1, and q is divided by sqrt(K). Chunks may hold several sequences: a token reads the
    state of earlier chunks only if its sequence began there, and is joined to tokens of its sequence alone.

    Args:
        query, key: [T, key heads, K].
        value: [T, heads, V]; key heads divides heads.
        decay, beta: [T, heads], decay in fp32 and not positive.
    Returns:
        [T, heads, V].
    """
    num_tokens, heads = decay.shape
    first = torch.arange(num_tokens, device=value.device) - pack.positions  # the token with which its sequence begins
    repeats = heads // query.shape[1]
    query = _unit(query.float()).repeat_interleave(repeats, dim=1)
    query = query * query.shape[-1] ** -0.5
    key = _unit(key.float()).repeat_interleave(repeats, dim=1)

    query = _chunks(query)
    key = _chunks(key)
    value = _chunks(value.float())
    decay = _chunks(decay.float())
    beta = _chunks(beta.float())[..., None]
    first = _chunks(first[:, None], fill=num_tokens)  # [chunks, 1, C], as all below with heads in the middle

    starts = torch.arange(len(first), device=first.device)[:, None, None] * DELTA_CHUNK
    total = decay.cumsum(-1)
    is_joined = (first[..., :, None] == first[..., None, :]).tril()
    differences = total[..., :, None] - total[..., None, :]
    pairs = differences.masked_fill(~is_joined, -torch.inf).exp()
    from_state = total.exp() * (first < starts)
    from_state = from_state[..., None]
    to_state = (total[..., -1:] - total).exp() * (first == first[..., -1:])
    to_state = to_state[..., None]

    # Within a chunk each token's writing depends on the tokens before it: a triangular system for all of them.
    written = key * beta
    solved = torch.linalg.solve_triangular(
        written @ key.mT * pairs,
        torch.cat((value * beta, written * from_state), dim=-1),
        upper=False,
        unitriangular=True,
    )
    key_size = key.shape[-1]
    value_size = value.shape[-1]
    values, read = solved.split([value_size, key_size], dim=-1)
    within = query @ key.mT * pairs
    query = query * from_state
    key = key * to_state

    state = key.new_zeros(heads, key_size, value_size)
    outputs = []
    for chunk in range(len(first)):
        new = values[chunk] - read[chunk] @ state
        outputs.append(query[chunk] @ state + within[chunk] @ new)
        state = state * from_state[chunk, :, -1:] + key[chunk].mT @ new
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:num_tokens]


def _unit(vectors: Tensor) -> Tensor:
    """Return vectors of length 1."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


def _chunks(tensor: Tensor, fill: int = 0) -> Tensor:
    """Cut tokens into chunks, the last one filled up: [T, heads, ...] -> [chunks, heads, C, ...]."""
    padding = (0, 0) * (tensor.ndim - 1) + (0, -len(tensor) % DELTA_CHUNK)
    return F.pad(tensor, padding, value=fill).unflatten(0, (-1, DELTA_CHUNK)).transpose(1, 2)


class _Gated:
    """Attention whose projection of queries also makes an output gate: for each head its query, then its gate, as
    checkpoints have them. Megatron has all gates of a group after its queries."""

    def get_query_key_value_tensors(self, hidden_states: Tensor, *unused: Any, **options: Any) -> tuple[Tensor, ...]:
        mixed, _ = self.linear_qkv(hidden_states)
        size = self.hidden_size_per_attention_head
        groups = self.num_query_groups_per_partition
        mixed = mixed.view(*mixed.shape[:2], groups, -1, size)
        queries, key, value = mixed.split([mixed.shape[3] - 2, 1, 1], dim=3)
        query, gate = (part.flatten(2, 3) for part in queries.unflatten(3, (-1, 2)).unbind(4))
        return self.q_layernorm(query), self.k_layernorm(key.squeeze(3)), value.squeeze(3), gate


class GatedAttention(_Gated, attention.SelfAttention):
    """Megatron's attention with an output gate."""


class PackedGatedAttention(_Gated, SelfAttention):
    """The same of the torch-only layers."""


class AttentionOfLayer:
    """Builds a layer's attention: linear, or of the class `full`, as `linear_attention_freq` has it."""

    def __new__(
        cls, config: TransformerConfig, layer_number: int, full: type[torch.nn.Module], **options: Any
    ) -> torch.nn.Module:
        kind = GatedDeltaNet if config.linear_attention_freq[layer_number - 1] else full
        return kind(config=config, layer_number=layer_number, **options)
