"""From a Hugging Face config.json to megatron-core's TransformerConfig and GPTModel arguments."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megappo import platform
from megappo.architecture.families import (
    FAMILIES,
    Family,
    HeadKind,
    divided_sizes,
    is_tied,
    num_experts,
    num_key_value_heads,
    sliding_window,
)
from megappo.config.errors import ConfigError
from megappo.config.schema import Model, Parallel
from megappo.models.latent_attention import latent_arguments
from megappo.models.layer_specs import layer_kind
from megappo.models.rope import rotary_base
from megappo.models.routing import expert_arguments, unsupported_routing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(hf: dict[str, Any], model: Model, parallel: Parallel, recompute: str) -> TransformerConfig:
    """Megatron's description of the layers of `hf`, in one layout.

    Args:
        hf: config.json of a model of one of FAMILIES.
        recompute: "none", "selective" (attention) or "full" (every layer).
    Raises:
        ValueError: the model is not supported, or does not divide into the layout.
    """
    family = _family(hf)
    _check_divides(hf, parallel)
    dtype, interleaved = DTYPES[model.dtype], parallel.virtual_pipeline > 1
    kind = MLATransformerConfig if family.latent_attention else TransformerConfig
    return kind(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        **(latent_arguments(hf) if family.latent_attention else _head_arguments(hf, family)),
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        context_parallel_size=parallel.context,
        pipeline_model_parallel_size=parallel.pipeline,
        pipeline_model_parallel_layout=_pipeline_layout(parallel),
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        # Two stages of several chunks are each other's next and previous stage: in a batch their messages would cross.
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved,
        sequence_parallel=parallel.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        attention_softmax_in_fp32=True,
        calculate_per_token_loss=True,
        # Packed micro-batches differ in length; Megatron then demands this dispatcher even of dense models.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # gloo sends asynchronously: the tensor must outlive the call.
        deallocate_pipeline_outputs=platform.has_cuda(),
        use_cpu_initialization=not platform.has_cuda(),
        # Every weight is loaded later, yet only initialization marks weights as sharded: unmarked ones would be left
        # out of the gradient norm on all but the first tensor-parallel rank. So it runs, and writes nothing: on a CPU
        # Megatron would draw every weight whole, in float32, on each rank.
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        **expert_arguments(hf, parallel),
        **_fusions(model, family),
        **RECOMPUTE[recompute],
    )


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """An initialization that initializes nothing."""
    return weight


def _head_arguments(hf: dict[str, Any], family: Family) -> dict[str, Any]:
    """TransformerConfig's arguments of attention whose heads have keys and values of their own, or share them."""
    return {
        "num_query_groups": num_key_value_heads(hf),
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_layernorm,
    }


def _pipeline_layout(parallel: Parallel) -> list[list[str]] | None:
    """The modules of every chunk of every stage, where the config says how many layers each has."""
    if parallel.pipeline_split is None or parallel.pipeline == 1:
        return None
    chunks = [["decoder"] * layers for layers in parallel.pipeline_split]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return chunks


def _fusions(model: Model, family: Family) -> dict[str, bool]:
    """TransformerConfig's fused kernels, which megatron-core leaves off: those that gain something without biases and
    dropout. They need TransformerEngine; with latent attention it rotates by YaRN alone."""
    fused = layer_kind(model.layer_spec) == "transformer_engine"
    return {"bias_activation_fusion": fused, "apply_rope_fusion": fused and not family.latent_attention}


def gpt_arguments(hf: dict[str, Any], tensor: int, head: HeadKind) -> dict[str, Any]:
    """GPTModel's keyword arguments besides the TransformerConfig: vocabulary, positions, tied embeddings.

    Args:
        tensor: tensor-parallel ranks, into which the vocabulary is padded to divide.
        head: with "value" the embeddings are never tied, as there is no output embedding.
    """
    return {
        "vocab_size": padded_vocab_size(hf["vocab_size"], tensor),
        "max_sequence_length": hf["max_position_embeddings"],
        "share_embeddings_and_output_weights": is_tied(hf) and head != "value",
        "position_embedding_type": "rope",
        "rotary_base": rotary_base(hf),
    }


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """The next multiple of `tensor`; rows from vocab_size on are padding."""
    return -(-vocab_size // tensor) * tensor


def _family(hf: dict[str, Any]) -> Family:
    """The family of `hf`, or an error that names what is not supported and what is."""
    architectures = hf.get("architectures") or ["no architecture at all"]
    if architectures[0] not in FAMILIES:
        raise ValueError(
            f"config.json names {architectures[0]}, which is not supported; supported are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[architectures[0]]
    unsupported = {
        "quantization_config": bool(hf.get("quantization_config")),
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(hf.get("attention_bias")),
        "mlp_bias": bool(hf.get("mlp_bias")),
        "layer_types": bool(set(hf.get("layer_types") or ()) - _attention_types(hf)),
        "qkv_bias": hf.get("qkv_bias", True) is False,
        "rope_interleave": family.latent_attention and not hf.get("rope_interleave", True),
        **(unsupported_routing(hf, family.experts) if family.experts else {}),
    }
    for key, is_unsupported in unsupported.items():
        if is_unsupported:
            found = f"config.json of this {architectures[0]} has {key} = {hf[key]!r}"
            raise ConfigError([f"{found}, which is not supported"])
    return family


def _attention_types(hf: dict[str, Any]) -> set[str]:
    """Attention that is full on every row of a run: a run whose rows would be longer than the window does not start."""
    return {"full_attention", "sliding_attention"} if sliding_window(hf) else {"full_attention"}


def _check_divides(hf: dict[str, Any], parallel: Parallel) -> None:
    wrong = [
        f"{key} = {size} does not divide by parallel.{name} = {ranks}"
        for key, (size, name, ranks) in divided_sizes(hf, parallel).items()
        if size % ranks
    ]
    for name, ways in (("expert", parallel.expert), ("expert_tensor", parallel.expert_tensor)):
        if not num_experts(hf) and ways > 1:
            wrong.append(f"parallel.{name} = {ways}, but {hf['architectures'][0]} has no experts")
    if num_experts(hf) and parallel.tensor > 1 and not parallel.sequence:
        wrong.append("a mixture of experts with parallel.tensor > 1 needs parallel.sequence = true")
    layers, chunks, split = hf["num_hidden_layers"], parallel.num_chunks, parallel.pipeline_split
    product = "parallel.pipeline" + (" x virtual_pipeline" if parallel.virtual_pipeline > 1 else "")
    if split is None and layers % chunks:
        wrong.append(
            f"num_hidden_layers = {layers} does not divide by {product} = {chunks}, and no parallel.pipeline_split "
            "says how many are in each"
        )
    if split is not None and (len(split), sum(split)) != (chunks, layers):
        wrong.append(
            f"parallel.pipeline_split = {list(split)} is not num_hidden_layers = {layers} in {product} = {chunks} parts"
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        wrong.append(f"parallel.virtual_pipeline = {parallel.virtual_pipeline} needs parallel.pipeline > 1")
    if parallel.sequence and parallel.tensor == 1:
        wrong.append("parallel.sequence needs parallel.tensor > 1")
    if wrong:
        raise ValueError("the model does not fit the layout: " + "; ".join(wrong))
