"""Modules of a transformer layer: TransformerEngine's, or torch-only ones that also run on a CPU. The latter replace
modules that Megatron lacks, or lacks for packed batches and sequence parallelism."""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE, TEColumnParallelLinear, TENorm
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megappo.architecture.architecture import Architecture
from megappo.architecture.families import Family
from megappo.architecture.switches import te_refusal
from megappo.config.config_error import ConfigError
from megappo.models.cut_parameters import CutParameters
from megappo.models.linear_attention import AttentionOfLayer, GatedAttention, PackedGatedAttention
from megappo.models.packed_attention import MropeAttention, NormedValueAttention, PackedAttention, SelfAttention
from megappo.runtime import platform


def layer_kind(wanted: str, fault: str = "") -> str:
    """Return the library of the layers, "torch" or "transformer_engine".

    Args:
        wanted: model.layer_spec: "torch", "transformer_engine", or "auto", which takes the latter where it is installed
            with CUDA and can compute the model.
        fault: why it cannot, see `te_fault`.
    Raises:
        ConfigError: "transformer_engine" is wanted and cannot run here; or it is installed and cannot be imported.
    """
    if wanted == "transformer_engine" and fault:
        raise ConfigError(te_refusal(fault))
    if wanted == "torch" or (wanted == "auto" and (fault or not platform.has_transformer_engine())):
        return "torch"
    if not platform.has_transformer_engine():
        raise ConfigError(
            "model.layer_spec is transformer_engine, but TransformerEngine is not installed or CUDA is missing: "
            "install transformer-engine, or set model.layer_spec=torch"
        )
    if not HAVE_TE:  # megatron-core would build its layers of mocks
        raise ConfigError(
            f"model.layer_spec is {wanted}, but TransformerEngine is installed and cannot be imported "
            f"({platform.fault('transformer-engine')}): build it again, see docs/troubleshooting.md, or "
            "set model.layer_spec=torch"
        )
    return "transformer_engine"


def layer_spec(
    config: TransformerConfig,
    family: Family,
    has_te: bool,
    stage: int,
    chunk: int,
) -> TransformerBlockSubmodules:
    """The decoder of one chunk of a pipeline stage, as GPTModel's `transformer_layer_spec`. The component's groups are
    active.

    Args:
        has_te: the layers are TransformerEngine's.
        stage, chunk: pipeline rank and the chunk's index on it, which give the number of layers.
    """
    decoder = get_gpt_decoder_block_spec(
        config, use_transformer_engine=has_te, normalization="RMSNorm", vp_stage=chunk, pp_rank=stage
    )
    if not has_te:
        decoder.layer_norm = RMSNorm
    for layer in decoder.layer_specs:
        if not has_te:
            _use_torch_modules(layer.submodules, config)
        if family.norms[0] is None:
            _leave_out_input_norms(layer.submodules, has_te)
        if family.vision:
            layer.submodules.self_attention.module = MropeAttention
        if family.value_norms:
            layer.submodules.self_attention.module = NormedValueAttention
        if config.linear_attention_freq:
            mixed = layer.submodules.self_attention
            mixed.module = AttentionOfLayer
            mixed.params["full"] = GatedAttention if has_te else PackedGatedAttention
    return decoder


def _leave_out_input_norms(layer: TransformerLayerSubmodules, has_te: bool) -> None:
    """Take the norms before attention and MLP away; TransformerEngine's are parts of linear layers."""
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    if has_te:
        layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        layer.mlp.submodules.linear_fc1 = TEColumnParallelLinear


def _use_torch_modules(layer: TransformerLayerSubmodules, config: TransformerConfig) -> None:
    """Replace the modules of Megatron's local layer that refuse sequence parallelism and packs, or are slow."""
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention
    attention.module = LatentSelfAttention if config.multi_latent_attention else SelfAttention
    attention.submodules.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.submodules.q_layernorm = RMSNorm
        key_norm = "kv_layernorm" if config.multi_latent_attention else "k_layernorm"
        setattr(attention.submodules, key_norm, RMSNorm)
    mlp = layer.mlp.submodules
    parts = [mlp.experts.submodules, mlp.shared_experts.submodules] if hasattr(mlp, "experts") else [mlp]
    for part in parts:
        part.activation_func = swiglu


def change_outputs(gpt: GPTModel, architecture: Architecture, has_te: bool) -> None:
    """Give each layer norms and a factor of the outputs of attention and MLP, before these are added to the residual.

    Megatron's layer has no place for them (megatron-core 0.16.1, transformer_layer.py).
    """
    config = gpt.config
    kind = TENorm if has_te else RMSNorm
    _, after_attention, _, after_mlp = architecture.family.norms
    for layer in gpt.decoder.layers:
        for name, block, is_there in (
            ("post_attention_layernorm", layer.self_attention, after_attention),
            ("post_mlp_layernorm", layer.mlp, after_mlp),
        ):
            if is_there:
                norm = kind(config, config.hidden_size, config.layernorm_epsilon)
                layer.add_module(name, norm)
                block.register_forward_hook(partial(_change_output, norm))
            if architecture.scales.blocks != 1:
                block.register_forward_hook(
                    partial(_change_output, partial(torch.mul, other=architecture.scales.blocks))
                )


def scale_layers(gpt: GPTModel, family: Family) -> None:
    """Multiply the output of each layer by a factor of its own, which is loaded and not trained."""
    if not family.layer_scalars:
        return
    for layer in gpt.decoder.layers:
        layer.layer_scalar = torch.nn.Parameter(torch.ones(1, dtype=gpt.config.params_dtype))
        layer.register_forward_hook(lambda layer, inputs, output: (output[0] * layer.layer_scalar, *output[1:]))


def separate_expert_outputs(gpt: GPTModel) -> None:
    """Let experts add their biases in place, as Megatron does (megatron-core 0.16.1, mlp.py): without expert
    parallelism their outputs are views that a sum over the one rank of an expert returns, which autograd refuses."""
    for module in gpt.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert and gpt.config.add_bias_linear:
            module.explicit_expert_comm = True  # the dispatcher's, if any


def use_local_rope(gpt: GPTModel, architecture: Architecture) -> None:
    """Make the layers with a window rotate by positions of another base."""
    if architecture.local_rope_base is None:
        return
    gpt.local_rotary_pos_emb = RotaryEmbedding(
        gpt.config.kv_channels,
        rotary_percent=architecture.rope.part,
        rotary_interleaved=gpt.config.rotary_interleaved,
        rotary_base=architecture.local_rope_base,
        use_cpu_initialization=gpt.config.use_cpu_initialization,
        cp_group=gpt.pg_collection.cp,
    )

    def rotate_locally(attention: torch.nn.Module, inputs: tuple, options: dict[str, Any]) -> tuple:
        angles = gpt.local_rotary_pos_emb(len(options["rotary_pos_emb"]), packed_seq=True)
        return inputs, options | {"rotary_pos_emb": angles}

    for layer in gpt.decoder.layers:
        if architecture.windows[layer.layer_number - 1]:
            layer.self_attention.register_forward_pre_hook(rotate_locally, with_kwargs=True)


def add_norms_of_all_heads(gpt: GPTModel, architecture: Architecture) -> None:
    """Give attention norms of the queries, and of the keys, of all heads together.

    Megatron's norms are over each head, and its layers pass them no group of the ranks with the other heads. Where
    layers with a window have plain positions, YaRN's factor is in the queries' norm, as all layers share one
    `softmax_scale`.
    """
    if not architecture.family.norms_all_heads:
        return
    for layer in gpt.decoder.layers:
        attention = layer.self_attention
        group = gpt.pg_collection.tp
        is_scaled = architecture.local_rope_base and not architecture.windows[layer.layer_number - 1]
        factor = architecture.rope.magnitude**2 if is_scaled else 1.0
        attention.q_layernorm = NormOfAllHeads(gpt.config, architecture.num_heads, group, factor)
        attention.k_layernorm = NormOfAllHeads(gpt.config, architecture.num_kv_heads, group)


class NormOfAllHeads(CutParameters):
    """RMS norm of all heads together, of which each tensor-parallel rank has some.

    Args:
        num_heads: heads of all ranks.
        factor: factor of the result.
    """

    cut = MappingProxyType({"weight": 0})

    def __init__(
        self,
        config: TransformerConfig,
        num_heads: int,
        group: dist.ProcessGroup,
        factor: float = 1.0,
    ):
        super().__init__()
        self.tp_group = group
        self.eps = config.layernorm_epsilon
        self.factor = factor
        self.size = num_heads * config.kv_channels
        self.weight = torch.nn.Parameter(torch.empty(self.size // group.size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise [..., heads, D], the heads of this rank."""
        dtype = torch.promote_types(heads.dtype, torch.float32)
        wide = heads.flatten(-2).to(dtype)
        own = wide.square().sum(-1, keepdim=True)
        squares = reduce_from_tensor_model_parallel_region(own, group=self.tp_group)
        squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)  # sums their gradient
        scale = torch.rsqrt(squares / self.size + self.eps) * self.factor
        normalised = wide * scale * self.weight
        return normalised.to(heads.dtype).view_as(heads)


def _change_output(
    change: Callable[[Tensor], Tensor],
    block: torch.nn.Module,
    inputs: tuple,
    output: tuple,
) -> tuple[Tensor, None]:
    """Change the output of a block, as its forward hook; beside it is its bias, or None."""
    plain, bias = output
    return change(plain if bias is None else plain + bias), None


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, its weight marked so that Megatron sums its gradient over sequence shards.

    With `layernorm_zero_centered_gamma` it multiplies by the weight plus 1.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
        self.adds_one = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]."""
        if not self.adds_one:
            return super().forward(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.normalized_shape, 1 + self.weight.to(wide), self.eps).to(x.dtype)


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Return silu(gate) * up, an MLP's activation: [..., 2 x size] -> [..., size].

    It keeps `gate_and_up` alone for the backward pass; torch's operations would keep silu(gate), too.
    """
    return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        grads = torch.empty_like(gate_and_up)
        grad_gate, grad_up = grads.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grads


class ReplicatedLinear(torch.nn.Module):
    """A linear map that every tensor-parallel rank has whole, and applies to its own tokens.

    It stands in for Megatron's ColumnParallelLinear where TransformerEngine has a "duplicated" TELinear.
    """

    def __init__(self, inputs: int, outputs: int, config: TransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees its own tokens: Megatron then sums the gradient over them.
        self.weight.sequence_parallel = config.sequence_parallel
        config.init_method(self.weight)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[..., inputs] -> [..., outputs], and None: there is no bias to add."""
        return F.linear(hidden, self.weight), None


class LatentSelfAttention(MLASelfAttention):
    """Megatron's multi-head latent attention, with the maps to latent vectors whole on every tensor-parallel rank.

    Without TransformerEngine Megatron cuts them and gathers their outputs. Each rank would then keep only its own
    heads' part of the gradient of the rotary key, which all heads share.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        latent_and_rope = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, latent_and_rope, config)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
