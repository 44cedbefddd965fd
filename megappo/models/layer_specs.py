"""Modules of a transformer layer: TransformerEngine's, or torch-only ones that also run on a CPU."""

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megappo.config.config_error import ConfigError
from megappo.models.packed_attention import PackedAttention, SelfAttention
from megappo.models.torch_layers import LatentSelfAttention, RMSNorm, swiglu
from megappo.runtime import platform


def layer_kind(wanted: str) -> str:
    """Return the library of the layers, "torch" or "transformer_engine".

    Args:
        wanted: model.layer_spec: "torch", "transformer_engine", or "auto", which takes the latter where it is installed
            with CUDA.
    Raises:
        ConfigError: "transformer_engine" is wanted and cannot run here; or it is installed and cannot be imported.
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
            f"({platform.fault('transformer-engine')}): build it again, see docs/troubleshooting.md, or "
            "set model.layer_spec=torch"
        )
    return "transformer_engine"


def layer_spec(config: TransformerConfig, has_te: bool, stage: int, chunk: int) -> TransformerBlockSubmodules:
    """The decoder of one chunk of a pipeline stage, as GPTModel's `transformer_layer_spec`. The component's groups are
    active.

    Args:
        has_te: whether the layers are TransformerEngine's.
        stage, chunk: pipeline rank and the chunk's index on it, which give the number of layers.
    """
    if not has_te:
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
    attention.module = LatentSelfAttention if config.multi_latent_attention else SelfAttention
    mlp = parts.mlp.submodules
    for part in (mlp,) if num_experts is None else (mlp.experts.submodules, mlp.shared_experts.submodules):
        part.activation_func = swiglu
    return layer
