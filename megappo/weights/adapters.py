"""Adapters (LoRA): as they start, and as PEFT writes them."""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from megappo.architecture.parameters import LORA_B, Piece
from megappo.config.schema import Lora
from megappo.placement.groups import ComponentGroups
from megappo.weights.buckets import NamedTensors
from megappo.weights.shards import cut_over

PREFIX = "base_model.model."
"""Of PEFT's names, before those of the model."""


def draw_adapter(part: torch.Tensor, piece: Piece, groups: ComponentGroups, seed: int) -> None:
    """Fill this rank's shard of an adapter's matrix: a with numbers drawn evenly up to in^-1/2, of which each rank
    makes all, so that they do not depend on the layout; b with 0, so that nothing is added yet.

    Source: PEFT, LoraLayer.reset_lora_parameters.
    """
    if piece.name.endswith(LORA_B):
        part.zero_()
        return
    generator = torch.Generator().manual_seed(seed % 2**32 * 2**32 + zlib.crc32(piece.name.encode()))
    whole = torch.empty(piece.shape).uniform_(-1, 1, generator=generator) / math.sqrt(piece.shape[1])
    if piece.shard_dim is not None:
        whole = whole.chunk(cut_over(piece, groups).size(), piece.shard_dim)[cut_over(piece, groups).rank()]
    part.copy_(whole.unflatten(0, part.shape[:2]))


def peft_config(lora: Lora) -> dict[str, Any]:
    """What PEFT's adapter_config.json says of them."""
    sizes = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.modules)}
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", **sizes}


def write_adapters(folder: Path, adapters: NamedTensors, lora: Lora, base: str | Path) -> None:
    """Write them, whole, as PEFT does.

    Args:
        base: the folder of the model beside whose weights they stand.
    Raises:
        OSError: they cannot be written.
    """
    tensors = {PREFIX + name: tensor.contiguous() for name, tensor in adapters}
    # safetensors 0.8's own save_file makes a file that nobody else may read.
    (folder / "adapter_model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    config = peft_config(lora) | {"base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
