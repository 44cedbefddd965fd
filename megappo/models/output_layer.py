"""A language model's last layer: it returns the hidden states, for the heads to compute logits block by block."""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

LogitFactors = tuple[torch.Tensor, torch.Tensor]
"""Hidden states [T, H] and this rank's shard of the output weight, [V/tp, H]: logits are hidden @ weight.T."""


def return_hidden_states(gpt: GPTModel) -> None:
    """Have a last stage return the hidden states that its output layer reads, [1, T, H], on every tensor-parallel rank.

    Most tokens, those of prompts, need no logits. The gradient that comes back must be whole on every rank.
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


def with_plain_strides(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states [T, 1, H], contiguous, with the strides (H, H, 1); so is the gradient that comes back.

    Megatron transposes [1, T, H] behind the embedding and, in the backward pass, before the head. The result has the
    strides (H, T x H, 1), which count as contiguous and spread through the layers; torch then multiplies by weights
    without a gradient, those of a reference or under adapters, in T products, which took as long as all other work of
    the layers.
    """
    return hidden.flatten(0, 1).unsqueeze(1)
