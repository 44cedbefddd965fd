"""A folder with a reward model's adapters, as PEFT writes it."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG = {
    "peft_type": "LORA",
    "task_type": "SEQ_CLS",
    "base_model_name_or_path": "model",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "v_proj"],
    "modules_to_save": ["score"],
    "use_rslora": False,
    "rank_pattern": {},
}


LAYERS, SHAPES = 6, {"q_proj": 64, "v_proj": 32}
"""Layers of the model in `tests/config/conftest.py`, and outputs of its matrices, which have 64 inputs."""


def adapters() -> dict[str, torch.Tensor]:
    """Return adapters of each layer's matrices, and a score."""
    tensors = {"score.weight": torch.zeros(1, 64)}
    for layer in range(LAYERS):
        for name, rows in SHAPES.items():
            path = f"model.layers.{layer}.self_attn.{name}"
            tensors |= {f"{path}.lora_A.weight": torch.zeros(2, 64), f"{path}.lora_B.weight": torch.zeros(rows, 2)}
    return tensors


def write_adapters(
    folder: Path,
    base: str = "model",
    tensors: Mapping[str, torch.Tensor] | None = None,
    /,
    more: Mapping[str, torch.Tensor] = MappingProxyType({}),
    lacks: str | None = None,
    **changes: Any,
) -> None:
    """Replace a folder.

    Args:
        more, lacks: further tensors; a part of the names of tensors that it lacks.
        changes: changes of adapter_config.json, or `...`: without the file, the folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if "folder" in changes:
        return
    folder.mkdir()
    settings = CONFIG | {"base_model_name_or_path": base} | {key: one for key, one in changes.items() if one != ...}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    if "file" not in changes:
        found = {**(tensors or adapters()), **more}
        kept = {f"base_model.model.{name}": one for name, one in found.items() if lacks is None or lacks not in name}
        save_file(kept, folder / "adapter_model.safetensors")
