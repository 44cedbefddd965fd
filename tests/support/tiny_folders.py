"""Hugging Face folders of several shards, and Megatron models loaded from them."""

import functools
import json
from pathlib import Path
from typing import Any

import tiny_models
import tiny_shapes
import torch
from layouts import parallel_of

from megappo.architecture.families import HeadKind
from megappo.architecture.parsing import read_architecture
from megappo.config.schema import Model
from megappo.models.gpt import ModelChunks, build_model
from megappo.placement.groups import ComponentGroups
from megappo.weights.load import load_hf

HEADS = {"head_dim": 16}
"""Wider than the hidden size divided by their number, as some models have them."""
SHAPE = tiny_shapes.SHAPE | HEADS
hf_folder = functools.partial(tiny_models.hf_folder, max_shard_size=40_000, **HEADS)


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def build(
    folder: Path,
    groups: ComponentGroups,
    dtype: str = "fp32",
    head: HeadKind = "policy",
    split: tuple[int, ...] | None = None,
) -> ModelChunks:
    """Build a model without weights in the layout of its groups."""
    parallel = parallel_of(groups.layout, pipeline_split=split, sequence=groups.layout.tensor > 1)
    return build_model(
        read_architecture(folder, head),
        Model(path=str(folder), dtype=dtype),
        parallel,
        groups,
        recompute="none",
        trained=True,
    )


def load(
    folder: Path,
    groups: ComponentGroups,
    dtype: str = "fp32",
    head: HeadKind = "policy",
    split: tuple[int, ...] | None = None,
) -> ModelChunks:
    chunks = build(folder, groups, dtype, head, split)
    # A weight that nobody loads must show.
    for chunk in chunks:
        for weight in (*chunk.parameters(), *chunk.buffers()):
            weight.data.fill_(torch.nan)
    load_hf(chunks, folder, read_architecture(folder, head), groups)
    return chunks
