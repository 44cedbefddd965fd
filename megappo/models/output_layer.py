"""A language model's last layer, whose product with the hidden states is the heads' to compute: block by block."""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megappo.models.strides import with_plain_strides

LogitFactors = tuple[torch.Tensor, torch.Tensor]
"""Hidden states [T, H] and this rank's shard of the output weight, [V/tp, H]: logits are hidden @ weight.T."""


def hand_hidden_on(gpt: GPTModel) -> None:
    """Have a last stage return the hidden states that its output layer reads, [1, T, H], on every tensor-parallel rank.

    Of most tokens, those of prompts, nobody asks for logits. The gradient that comes back must be whole on every rank.
    """
    layer = gpt.output_layer

    def forward(hidden: torch.Tensor, weight: object = None, runtime_gather_output: object = None) -> tuple:
        if layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=gpt.pg_collection.tp
            )
        return with_plain_strides(hidden), None

    layer.forward = forward


def output_weight(gpt: GPTModel) -> torch.Tensor:
    """This rank's shard of a last stage's output weight, [V/tp, H]: the embedding's where they are tied."""
    if gpt.share_embeddings_and_output_weights:
        return gpt.shared_embedding_or_output_weight()
    return gpt.output_layer.weight
