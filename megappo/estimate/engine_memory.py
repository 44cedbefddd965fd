"""Estimate the bytes that an SGLang engine takes on each of its GPUs."""

from megappo.architecture.architecture import Architecture
from megappo.architecture.dtypes import DTYPES
from megappo.config.schema import Config

PREFILL_CHUNK = 8192
"""Tokens of prompts that an engine computes at a time, on GPUs of 80 GB and more."""
GRAPH_BYTES = 2 * 2**20
"""Bytes of CUDA graphs per sequence of the largest batch. Source: SGLang 0.5.23, arg_groups/memory_hook.py."""
FP32_LOGITS = 3
"""Copies of a batch's logits that sampling makes."""


class EngineMemory:
    """Bytes of one engine on each of its GPUs.

    Args:
        size: number of the policy's parameters.
        free_bytes: free memory of a GPU when the engine starts, before any model is built.
    Attributes:
        weights: the policy's, sharded over the engine's GPUs.
        cache: keys and values, which fill the rest of SGLang's share of `free_bytes`.
        cache_per_token: bytes of a token in the cache.
        cache_tokens: tokens that the cache can hold; below 0 if the weights alone are too large.
    """

    def __init__(self, config: Config, architecture: Architecture, size: int, free_bytes: float):
        self.rollout, self.architecture = config.rollout, architecture
        self._nbytes = DTYPES[config.model.dtype].nbytes
        self.weights = size * self._nbytes / self.rollout.tensor_parallel
        self.cache_per_token = self._nbytes * architecture.num_layers * self._cached_numbers()
        room = (self.rollout.mem_fraction_static * free_bytes - self.weights) / self.cache_per_token
        self.cache_tokens = min(room, self.rollout.max_total_tokens or room)
        self.cache = max(self.cache_tokens, 0) * self.cache_per_token

    @property
    def graphs(self) -> float:
        """Bytes of the CUDA graphs of decoding."""
        return self.rollout.max_running_requests * GRAPH_BYTES

    @property
    def working(self) -> float:
        """Bytes of a layer's activations for a chunk of prompts, and of logits to sample from."""
        experts = self.architecture.experts
        widest = max(self.architecture.ffn_size, experts.top_k * experts.ffn_size if experts else 0)
        layer = 3 * (self.architecture.hidden_size + widest / self.rollout.tensor_parallel)
        sampled = self.rollout.max_running_requests * self.architecture.vocab_size * 4 * FP32_LOGITS
        return sampled + PREFILL_CHUNK * self._nbytes * layer

    def _cached_numbers(self) -> float:
        """Return the numbers that a layer caches of a token: keys and values, whose heads are repeated if there are
        fewer than GPUs. With latent attention each GPU caches the whole latent vector."""
        latent = self.architecture.latent
        if latent:
            return latent.kv_rank + latent.rope_size
        heads = max(self.architecture.num_kv_heads / self.rollout.tensor_parallel, 1)
        return 2 * heads * self.architecture.head_size
