"""Bytes that an SGLang engine takes on each of its GPUs."""

from megappo.architecture.architecture import Architecture
from megappo.architecture.dtypes import DTYPES
from megappo.config.schema import Rollout

PREFILL_CHUNK = 8192
"""Tokens of prompts that an engine computes at a time, on GPUs of 80 GB and more."""
GRAPH_BYTES = 2 * 2**20
"""Of CUDA graphs, per sequence of the largest batch. Source: SGLang 0.5.23, arg_groups/memory_hook.py."""
FP32_LOGITS = 3
"""Copies of a batch's logits that sampling makes."""


def weight_bytes(size: int, dtype: str, rollout: Rollout) -> float:
    """Of a model of so many parameters, whose matrices are cut over the engine's GPUs."""
    return size * DTYPES[dtype].nbytes / rollout.tensor_parallel


def cache_bytes_per_token(architecture: Architecture, dtype: str, rollout: Rollout) -> float:
    """Keys and values of all layers; key-value heads are repeated where there are fewer than GPUs. Latent attention
    caches the latent vector, whole on each."""
    if architecture.latent:
        numbers = float(architecture.latent.kv_rank + architecture.latent.rope_size)
    else:
        heads = max(architecture.num_kv_heads / rollout.tensor_parallel, 1)
        numbers = 2 * heads * architecture.head_size
    return architecture.num_layers * numbers * DTYPES[dtype].nbytes


def working_bytes(architecture: Architecture, dtype: str, rollout: Rollout) -> float:
    """Besides weights and cache: CUDA graphs, a layer's activations of a chunk of prompts, logits to sample from."""
    ways = rollout.tensor_parallel
    experts = architecture.experts
    widest = max(architecture.ffn_size, experts.top_k * experts.ffn_size if experts else 0)
    layer = PREFILL_CHUNK * DTYPES[dtype].nbytes * (3 * architecture.hidden_size + 3 * widest / ways)
    sampled = rollout.max_running_requests * architecture.vocab_size * 4 * FP32_LOGITS
    return rollout.max_running_requests * GRAPH_BYTES + layer + sampled
