"""Count the floating-point operations of a model's mathematics, for MFU and for estimates of time.

Recomputed activations, padding and idle stages do not count, so that avoiding them raises the MFU.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from megappo.architecture.architecture import Architecture
from megappo.architecture.parameters import OUTPUT_LAYER, SECOND_HEAD, list_parameters

TRAINING = 3
"""Forward passes that a training step is worth: the backward pass multiplies each matrix twice."""
TRAINING_ADAPTERS = 2
"""The same beside frozen matrices, whose own gradient is not computed; adapters themselves are small."""


@dataclass(frozen=True)
class Flops:
    """Operations of a forward pass.

    Attributes:
        per_token: of the layers' matrix products.
        per_pair: of attention, for a token and one that it attends to (itself, and all before it).
        per_output: of the head, for a token that it reads.
        training: forward passes that a training step is worth.
    """

    per_token: float
    per_pair: float
    per_output: float
    training: int = TRAINING

    def forward(self, rows: Iterable[tuple[int, int]]) -> float:
        """Return the operations for rows, each given as (tokens, tokens that the head reads)."""
        return sum(
            tokens * self.per_token + tokens * (tokens + 1) / 2 * self.per_pair + outputs * self.per_output
            for tokens, outputs in rows
        )


def flops_of(architecture: Architecture) -> Flops:
    """Count a multiplication and an addition for each element of a matrix and token; for experts, those of a token.

    Attention is causal: a token attends to half of the others on average. A model's sliding window is ignored.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    equation 3, with half of attention and by the model's own matrices; Chowdhery et al. 2022 (PaLM), appendix B.
    """
    layers, head, chosen = 0.0, 0.0, architecture.experts.top_k if architecture.experts else 0
    for parameter in list_parameters(architecture, num_experts=1):  # all of a layer are alike
        if len(parameter.shard_shape) < 2:  # norms, biases
            continue
        flops = 2 * prod(parameter.shard_shape)
        if parameter.layer is not None:
            layers += flops * (chosen if parameter.hf_tensors[0].expert is not None else 1)
        elif parameter.names[0].startswith((OUTPUT_LAYER, SECOND_HEAD)):  # the embedding is only looked up
            head += flops
    heads, latent = architecture.num_heads, architecture.latent
    keys = latent.plain_size + latent.rope_size if latent else architecture.head_size
    values = latent.v_size if latent else architecture.head_size
    training = TRAINING if architecture.lora is None else TRAINING_ADAPTERS
    return Flops(layers, 2 * architecture.num_layers * heads * (keys + values), head, training)
