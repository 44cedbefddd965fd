"""Small random Hugging Face folders, and Megatron models loaded from them."""

import json
from pathlib import Path
from typing import Any

import torch
from tiny_deepseek import move_router_biases
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.architecture.families import HeadKind
from megappo.architecture.parsing import read_architecture
from megappo.config.schema import Model, Parallel
from megappo.models.build import ModelChunks, build_model
from megappo.placement.groups import ComponentGroups
from megappo.weights.load import load_hf

SHAPE = {
    "vocab_size": 91,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def hf_folder(
    folder: Path,
    model_type: str,
    dtype: torch.dtype = torch.float32,
    save_original_format: bool = True,
    **changes: object,
) -> Path:
    """A random model, every weight (norms and biases too) away from its initial value, in several shards."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE | changes), dtype=dtype)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    move_router_biases(model)
    model.save_pretrained(folder, max_shard_size=40_000, save_original_format=save_original_format)
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def build(
    folder: Path,
    groups: ComponentGroups,
    dtype: str = "fp32",
    head: HeadKind = "policy",
    split: tuple[int, ...] | None = None,
) -> ModelChunks:
    """An unloaded model in the layout of its groups."""
    layout = groups.layout
    parallel = Parallel(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
        pipeline_split=split,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        sequence=layout.tensor > 1,
    )
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
