"""Multi-head latent attention: DeepSeek's, whose keys and values come from one small vector per token."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megappo.architecture.architecture import Architecture, Rope


def latent_arguments(architecture: Architecture) -> dict[str, Any]:
    """MLATransformerConfig's arguments of the attention of a model that has latent attention.

    The norms of the latent vectors take the layers' `rms_norm_eps`, as SGLang's do; transformers fixes theirs at 1e-6,
    which is what published models have for both.
    """
    latent = architecture.latent
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain_size,
        "qk_pos_emb_head_dim": latent.rope_size,
        "v_head_dim": latent.v_size,
        "kv_channels": latent.v_size,
        "qk_layernorm": True,
        **_rope_arguments(architecture.rope),
    }


def _rope_arguments(rope: Rope) -> dict[str, Any]:
    """Rotary positions, with YaRN's factors on cosines and sines (mscale over mscale_all_dim) and on the softmax
    (mscale_all_dim)."""
    kind, numbers = "rope" if rope.kind == "default" else rope.kind, {"factor": 1.0, **rope.numbers}
    return {"rope_type": kind, "rotary_base": rope.base, "rotary_scaling_factor": numbers.pop("factor"), **numbers}


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

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[..., inputs] -> [..., outputs], and None: there is no bias to add."""
        return F.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron's attention, with the maps to the latent vectors whole on every tensor-parallel rank.

    Without TransformerEngine Megatron cuts them and gathers what they make. Of the rotary key, which all heads share,
    each rank would then keep only the gradient that its own heads give.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        latent_and_rope = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, latent_and_rope, config)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
