"""Floating-point operations of a model, for MFU and for estimates of time."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from megappo.architecture.architecture import Architecture
from megappo.architecture.parameters import OUTPUT_LAYER, SECOND_HEAD, is_trained, list_parameters

TRAINING = 3
"""Forward passes that a training step is worth: the backward pass multiplies each matrix twice."""
TRAINING_ADAPTERS = 2
"""The same beside frozen matrices, whose own gradient is not computed; adapters themselves are small."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a model's mathematics in a forward pass, for MFU and for estimates of time.

    Recomputed activations, padding and idle stages do not count, so that avoiding them raises the MFU.

    Attributes:
        per_token: FLOPs of the layers' matrix products.
        per_pair: FLOPs of attention, for a token and one that it attends to (itself, and all before it).
        per_output: FLOPs of the head, for a token that it reads.
        training: forward passes that a training step is worth.
    """

    per_token: float
    per_pair: float
    per_output: float
    training: float = TRAINING

    def forward(self, rows: Iterable[tuple[int, int]]) -> float:
        """Return the operations for rows, each given as (tokens, tokens that the head reads)."""
        flops = 0.0
        for tokens, outputs in rows:
            pairs = tokens * (tokens + 1) / 2
            flops += tokens * self.per_token + pairs * self.per_pair + outputs * self.per_output
        return flops


def flops_of(architecture: Architecture) -> Flops:
    """Count a multiplication and an addition for each element of a matrix and token; of the experts, count only as many
    as a token uses.

    Attention is causal: a token attends to half of the others on average. A model's sliding window is ignored.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    equation 3, with half of attention and by the model's own matrices; Chowdhery et al. 2022 (PaLM), appendix B.
    """
    layers = trained = head = 0.0
    chosen = architecture.experts.top_k if architecture.experts else 0
    for parameter in list_parameters(architecture, num_experts=1):  # all of a layer are alike
        if len(parameter.shard_shape) < 2:  # norms, biases
            continue
        flops = 2 * prod(parameter.shard_shape)
        if parameter.hf_tensors[0].expert is not None:
            flops *= chosen
        if parameter.layer is not None:
            layers += flops
            trained += flops * is_trained(parameter.names[0], architecture)
        elif parameter.names[0].startswith((OUTPUT_LAYER, SECOND_HEAD)):  # the embedding is only looked up
            head += flops
    latent = architecture.latent
    attending = [layer for layer in range(architecture.num_layers) if not architecture.is_linear(layer)]
    keys_and_values = sum(2 * architecture.heads_of(layer).size for layer in attending)
    if latent:
        keys_and_values = len(attending) * (latent.plain_size + latent.rope_size + latent.v_size)
    attention = 2 * architecture.num_heads * keys_and_values
    training = TRAINING_ADAPTERS if architecture.lora else TRAINING - 1 + trained / layers
    if architecture.linear:  # a token's key and query read the state, and its key changes it
        layers += architecture.num_linear_layers * 3 * 2 * architecture.linear.state
    return Flops(layers, attention, head, training)
