"""Scaling the rotary frequencies of a model whose attention is not latent."""

from megatron.core.models.gpt import GPTModel

from megappo.architecture.architecture import Architecture


def scale_rope(gpt: GPTModel, architecture: Architecture) -> None:
    """Scale the model's rotary frequencies; Megatron's own argument for Llama 3 takes only one of the four numbers.

    Latent attention scales its own, see `latent_arguments`.

    Source: transformers 5, modeling_rope_utils.py.
    """
    if architecture.latent:
        return
    rope, embedding = architecture.rope, gpt.rotary_pos_emb
    if rope.kind == "linear":
        embedding.inv_freq = embedding.inv_freq / rope.numbers["factor"]
    elif rope.kind == "llama3":
        embedding.inv_freq = embedding._apply_scaling(embedding.inv_freq, **rope.numbers)
