"""Strides by which torch multiplies all tokens at once."""

import torch


def with_plain_strides(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states [T, 1, H], contiguous, by the strides (H, H, 1); so is the gradient that comes back.

    Where Megatron has transposed them from [1, T, H], as behind the embedding, and their gradient before the head, they
    count as contiguous with a stride of T x H, as does all that is computed of them; and torch multiplies that by
    frozen weights token by token, which in an update of adapters took as long as all else of the layers.
    """
    return hidden.flatten(0, 1).unsqueeze(1)
