"""A folder with a reward model's adapters, as PEFT writes it."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
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


def write_adapters(
    folder: Path, base: str = "model", tensors: Mapping[str, torch.Tensor] | None = None, /, **changes: Any
) -> None:
    """Replace a folder; `changes` are of adapter_config.json, or `...`: without the score, the file, the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    if "folder" in changes:
        return
    folder.mkdir()
    settings = CONFIG | {"base_model_name_or_path": base} | {key: one for key, one in changes.items() if one != ...}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    name = "lora" if "score" in changes else "score"
    if "file" not in changes:
        found = tensors or {f"{name}.weight": torch.zeros(1, 64)}
        save_file({f"base_model.model.{key}": one for key, one in found.items()}, folder / "adapter_model.safetensors")
