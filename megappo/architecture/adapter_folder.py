"""Folders with a reward model's adapters and its score, in PEFT's format."""

import os
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megappo.architecture.architecture import Architecture
from megappo.architecture.model_folder import ADAPTERS, PEFT_PREFIX, tensor_files
from megappo.architecture.parameters import LORA_A, LORA_B, VALUE_HEAD, hf_shapes
from megappo.config.config_error import ConfigError, Errors, listed, show
from megappo.config.hub import cached_model
from megappo.config.model_sections import Lora
from megappo.config.text_files import TextFileError, read_json
from megappo.config.values import ADAPTED_MODULES

SUPPORTED: dict[str, Sequence[Any]] = {
    "peft_type": ["LORA"],
    "task_type": ["SEQ_CLS"],
    "bias": ["none"],
    "init_lora_weights": [True, "gaussian", "eva", "orthogonal", "mica"],
}
"""Keys of adapter_config.json -> the values that are supported, if they are set. Other initial values (PiSSA, OLoRA,
CorDA, LoftQ) belong to changed weights of the base."""
OTHER_KEYS = (
    *("r", "lora_alpha", "use_rslora", "base_model_name_or_path", "target_modules", "modules_to_save", "revision"),
    *("lora_dropout", "inference_mode", "auto_mapping", "megatron_config", "megatron_core", "peft_version"),
    *("layers_pattern", "eva_config", "qalora_group_size"),
    "fan_in_fan_out",  # which PEFT sets to False for a torch.nn.Linear (tuners/lora/model.py)
)
"""Keys that are read, that the tensors imply, or that do not change what trained adapters of linear layers compute. A
folder in which any other key is set is refused."""
REMEDY = (
    "name the adapters of a reward model, such as a run's hf_reward_model/adapter, or merge these into their base "
    "(merge_and_unload) and name the result in reward_model.model_path"
)


def read_lora(folder: str, base: str) -> Lora:
    """Return the settings of a reward model's adapters. The tensors decide which matrices have some.

    Args:
        base: folder of the model beside whose weights they are to stand.
    Raises:
        ConfigError: they cannot be read, are no reward model's, are of another base, or have unsupported settings.
    """
    try:
        raw = read_json(Path(folder, "adapter_config.json"))
        tensors = tensor_files(Path(folder), ADAPTERS)
    except TextFileError as error:
        remedy = "name a folder of adapters in PEFT's format"
        raise ConfigError(f"reward_model.adapter {folder}: {error}: {remedy}") from error
    settings = [(key, value) for key, value in raw.items() if value and key not in OTHER_KEYS]
    found = [f"{key} {show(value)}" for key, value in settings if value not in SUPPORTED.get(key, ())]
    modules = {name.split(".")[-3] for name in tensors if name.endswith(LORA_A)}
    try:
        lora = Lora(rank=raw.get("r"), alpha=raw.get("lora_alpha"), target_modules=sorted(modules & {*ADAPTED_MODULES}))
    except ValidationError as error:
        found += [f"{one['loc'][0]} {show(one['input'])} ({one['msg']})" for one in error.errors()]
    if found:
        raise ConfigError(
            f"reward_model.adapter {folder}: expected the settings of LoRA adapters of a reward model, found "
            f"{listed(found)}: {REMEDY}"
        )
    named = str(raw.get("base_model_name_or_path"))
    if _is_other(named, base):
        raise ConfigError(
            f"reward_model.adapter {folder}: the adapters are of the base {named}, but "
            f"reward_model.model_path is {base}: set it to their base, or correct base_model_name_or_path in "
            "adapter_config.json if both are the same model"
        )
    return lora.model_copy(update={"alpha": lora.alpha * sqrt(lora.rank)}) if raw.get("use_rslora") else lora


def adapter_tensor_errors(folder: str, architecture: Architecture) -> Errors:
    """Yield an error if a folder holds other tensors than the model's adapters and score: base weights in its place
    would not be read.

    Args:
        architecture: architecture of the base, with the adapters.
    """
    files = tensor_files(Path(folder), ADAPTERS)
    names = {name.removeprefix(PEFT_PREFIX) for name in files}
    read = {name for name in hf_shapes(architecture) if name.endswith((LORA_A, LORA_B, VALUE_HEAD))}
    if names != read:
        missing = listed(sorted(read - names))
        unknown = listed(sorted(names - read))
        found = f"missing {missing}; unknown {unknown}"
        yield f"reward_model.adapter {folder}: expected adapters of each layer and a {VALUE_HEAD}, {found}: {REMEDY}"


def _is_other(named: str, base: str) -> bool:
    """Return whether a base, a folder or a hub id, is another model than a folder's. A folder that was moved has the
    same last name."""
    named = cached_model(named)
    if os.path.isdir(named):
        return os.path.realpath(named) != os.path.realpath(base)
    return os.path.basename(named) != os.path.basename(base)
