"""Strides by which torch multiplies all tokens at once."""

import torch


def with_plain_strides(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states [T, 1, H], contiguous, by the strides (H, H, 1); so is the gradient that comes back.

    Megatron transposes [1, T, H] behind the embedding and, in the backward pass, before the head. What comes out has
    the strides (H, T x H, 1), which count as contiguous and spread through the layers; torch then multiplies by weights
    without a gradient, those of a reference or under adapters, in T products, which took as long as all else of the
    layers.
    """
    return hidden.flatten(0, 1).unsqueeze(1)
