"""An actor whose weights differ from the weights that an engine was started with."""

from pathlib import Path
from typing import Any

from tiny_models import hf_model
from torch import nn


def changed_actor(checkpoint: Path, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Return the checkpoint's model with other weights, and the config's sections of a run that trains it."""
    model = hf_model(checkpoint)
    for parameter in model.parameters():
        parameter.data *= 0.9
    model.save_pretrained(folder / "actor")
    return model, {
        "model": {"path": str(folder / "actor"), "dtype": "fp32"},
        "data": {"train_files": ["f"]},
        "trainer": {"output_dir": str(folder)},
    }
