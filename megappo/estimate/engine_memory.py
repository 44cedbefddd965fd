"""Bytes that an SGLang engine takes on each of its GPUs."""

from megappo.architecture.architecture import Architecture
from megappo.architecture.dtypes import DTYPES
from megappo.config.schema import Config

PREFILL_CHUNK = 8192
"""Tokens of prompts that an engine computes at a time, on GPUs of 80 GB and more."""
GRAPH_BYTES = 2 * 2**20
"""Of CUDA graphs, per sequence of the largest batch. Source: SGLang 0.5.23, arg_groups/memory_hook.py."""
FP32_LOGITS = 3
"""Copies of a batch's logits that sampling makes."""


class EngineMemory:
    """Of one engine on each of its GPUs.

    Args:
        size: parameters of the policy.
        free_bytes: of a GPU when the engine starts, which is before any model is built.
    Attributes:
        weights: the policy's, cut over the engine's GPUs.
        cache: keys and values, which take what is left of SGLang's share of `free_bytes`.
        cache_per_token: of it.
        cache_tokens: that it can hold; below 0 where the weights alone are too many.
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
        """CUDA graphs of decoding."""
        return self.rollout.max_running_requests * GRAPH_BYTES

    @property
    def working(self) -> float:
        """Besides: a layer's activations of a chunk of prompts, logits to sample from."""
        experts = self.architecture.experts
        widest = max(self.architecture.ffn_size, experts.top_k * experts.ffn_size if experts else 0)
        layer = 3 * (self.architecture.hidden_size + widest / self.rollout.tensor_parallel)
        sampled = self.rollout.max_running_requests * self.architecture.vocab_size * 4 * FP32_LOGITS
        return sampled + PREFILL_CHUNK * self._nbytes * layer

    def _cached_numbers(self) -> float:
        """Of a token in a layer: keys and values, whose heads are repeated where there are fewer than GPUs. Latent
        attention caches the latent vector, whole on each."""
        latent = self.architecture.latent
        if latent:
            return latent.kv_rank + latent.rope_size
        heads = max(self.architecture.num_kv_heads / self.rollout.tensor_parallel, 1)
        return 2 * heads * self.architecture.head_size
